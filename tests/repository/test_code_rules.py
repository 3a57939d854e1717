"""Rules that no linter checks: sizes, names, places of imports, and no execution of content that is read."""

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWEPT = ("clika_ref", "plugins", "conformance")
CORE = "clika_ref/core"

FILE_LINES = 600
FUNCTION_LINES = 60
CORE_LINES = 2000  # of code: a budget on the manual would be paid with docstrings

CORE_IMPORTS = {"pluggy", "sympy", "torch"}
VAGUE = {"base", "bases", "common", "helper", "helpers", "manager", "managers", "util", "utils"}
EXECUTING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
EXECUTING_BUILTINS = {"eval", "exec"}
EXECUTING_CALLS = {"torch.load", "sympy.sympify", "sympy.parse_expr", "sympify", "parse_expr"}
EXECUTING_CALLS |= {f"yaml.{load}" for load in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all")}
# What is executed there is not read: torch.fx writes it from our own graph, of which no name goes in.
WRITTEN_BY_FX = {("clika_ref/core/fx_execution.py", "exec")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(function: Function) -> int:
    """Lines from ``def`` to the end, without the docstring and the decorators."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function of a module, methods and nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def imported(node: ast.AST) -> list[str]:
    """The modules that one import statement names; a relative import starts with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for the expression ``a.b.c``; empty for any other kind."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def bound(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names that a module binds at its top level by definition or from-import, and their lines."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node.lineno) for alias in node.names)


# Each rule takes a file's path from the root and its source, and yields one message for each breach.


def long_file(path: str, source: str) -> Iterator[str]:
    """A file holds at most FILE_LINES lines."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, {lines - FILE_LINES} over the limit of {FILE_LINES}; cut it at its natural axis"


def long_function(path: str, source: str) -> Iterator[str]:
    """A function holds at most FUNCTION_LINES lines without its docstring."""
    for function in functions(ast.parse(source, path)):
        lines = lines_of(function)
        if lines > FUNCTION_LINES:
            yield (
                f"{path}:{function.lineno}: {function.name} has {lines} lines without its docstring, "
                f"{lines - FUNCTION_LINES} over the limit of {FUNCTION_LINES}"
            )


LATE = {("clika_ref/api.py", "clika_ref.pipeline")}
"""Allowed imports inside functions: the pipeline imports torch.export and sympy, which takes a second."""


def hidden_import(path: str, source: str) -> Iterator[str]:
    """The project is imported at the top of a file: inside a function an import hides a cycle or a misplaced fact."""
    breaches = {
        (node.lineno, name)
        for function in functions(ast.parse(source, path))
        for node in ast.walk(function)
        for name in imported(node)
        if name.startswith((".", "clika_ref")) and (path, name) not in LATE
    }
    yield from (
        f"{path}:{line}: imports {name} inside a function; move it to the top" for line, name in sorted(breaches)
    )


def vague_name(path: str, source: str) -> Iterator[str]:
    """No module or folder is called utils, helpers, manager, base or common, nor a form of these."""
    del source
    yield from (
        f"{path}: {part} says nothing of what is inside; name it after that"
        for part in Path(path).with_suffix("").parts
        if part.strip("_") in VAGUE
    )


def executing_read(path: str, source: str) -> Iterator[str]:
    """Nothing read is executed: safetensors and JSON instead of pickle, an allow-list instead of eval and sympify."""
    for node in ast.walk(ast.parse(source, path)):
        for name in imported(node):
            if name.split(".")[0] in EXECUTING_MODULES:
                yield f"{path}:{node.lineno}: imports {name}, which runs code while it reads"
        if not isinstance(node, ast.Call) or (path, dotted(node.func)) in WRITTEN_BY_FX:
            continue
        if dotted(node.func) in EXECUTING_BUILTINS | EXECUTING_CALLS:
            yield f"{path}:{node.lineno}: calls {dotted(node.func)}, which runs what it reads"


def heavy_core(path: str, source: str) -> Iterator[str]:
    """The core imports itself, the standard library, torch, sympy and pluggy only."""
    if not path.startswith(f"{CORE}/"):
        return
    for node in ast.walk(ast.parse(source, path)):
        for name in imported(node):
            top = name.split(".")[0]
            inside = name.startswith(("clika_ref.core", ".")) and not name.startswith("..")
            if not inside and top not in CORE_IMPORTS and top not in sys.stdlib_module_names:
                yield f"{path}:{node.lineno}: imports {name}; besides itself it has {', '.join(sorted(CORE_IMPORTS))}"


def shadowed_module(path: str, source: str) -> Iterator[str]:
    """No core module bears the name of a public object: ``from clika_ref.core import x`` means one thing."""
    if not path.startswith(f"{CORE}/"):
        return
    module = Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem
    for name, line in bound(ast.parse(source, path)):
        if name == module:
            yield f"{path}:{line}: {name} is also the name of its module; rename one of the two"


RULES = [long_file, long_function, hidden_import, vague_name, executing_read, heavy_core, shadowed_module]


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Count lines of code, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def over_budget(sources: dict[str, str]) -> Iterator[str]:
    """The core holds at most CORE_LINES lines of code in all."""
    lines = {path: code_lines(source) for path, source in sources.items() if path.startswith(f"{CORE}/")}
    total = sum(lines.values())
    if total > CORE_LINES:
        shares = ", ".join(f"{path} {count}" for path, count in sorted(lines.items(), key=lambda item: -item[1]))
        yield f"{CORE}: {total} lines of code, {total - CORE_LINES} over the budget of {CORE_LINES}: {shares}"


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The source of every Python file swept, by its path from the root."""
    paths = (path for folder in SWEPT for path in sorted((ROOT / folder).rglob("*.py")) if "build" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_sources_cover_core_plugins_and_conformance(sources):
    """The rules see the core, every plugin and the conformance suite."""
    folders = [path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")]
    assert folders
    expected = [CORE, "conformance/clika_ref_conformance", *(f"plugins/{name}/clika_ref_{name}" for name in folders)]
    missing = [folder for folder in expected if not any(path.startswith(f"{folder}/") for path in sources)]
    assert not missing, f"no Python file found in {missing}: a rule over nothing always holds"


@pytest.mark.parametrize("rule", RULES)
def test_repository_keeps_rule(rule: Callable[[str, str], Iterator[str]], sources):
    """Every file of the repository keeps the rule."""
    breaches = [message for path, source in sources.items() for message in rule(path, source)]
    assert not breaches, f"{rule.__doc__}\n" + "\n".join(breaches)


def test_core_within_line_budget(sources):
    """The core keeps its line budget."""
    breaches = list(over_budget(sources))
    assert not breaches, breaches[0]


# The rules themselves: each finds its breach, says where and how much, and lets the nearest lawful neighbour pass.


def function_of(lines: int, docstring: int = 0) -> str:
    """The source of a function of so many lines, plus a docstring of so many."""
    text = ['    """Say.', *["    more"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join(["@decorated", "def f():", *text, *["    x = 1"] * (lines - 1)])


CORE_FILE = f"{CORE}/ir.py"

BREACHES = [
    (long_file, CORE_FILE, "x = 1\n" * 601, f"{CORE_FILE}: 601 lines, 1 over the limit of 600"),
    (long_function, CORE_FILE, function_of(61), f"{CORE_FILE}:2: f has 61 lines"),
    (long_function, CORE_FILE, function_of(62, docstring=9), f"{CORE_FILE}:2: f has 62 lines"),
    (long_function, CORE_FILE, function_of(61).replace("def", "async def"), f"{CORE_FILE}:2: f has 61 lines"),
    (hidden_import, CORE_FILE, "def f():\n    from clika_ref.core import ir", f"{CORE_FILE}:2: imports clika_ref.core"),
    (hidden_import, CORE_FILE, "def f():\n    if x:\n        import clika_ref_aten", "ir.py:3: imports clika_ref_aten"),
    (
        hidden_import,
        "clika_ref/pipeline.py",
        "def f():\n    import clika_ref.pipeline",
        "clika_ref/pipeline.py:2: imports clika_ref.pipeline",
    ),
    (hidden_import, CORE_FILE, "class A:\n    def f(self):\n        from . import ir", "ir.py:3: imports ."),
    (vague_name, "clika_ref/capture/utils.py", "", "utils says nothing"),
    (vague_name, "clika_ref/_common/names.py", "", "_common says nothing"),
    (executing_read, CORE_FILE, "import pickle", f"{CORE_FILE}:1: imports pickle"),
    (executing_read, CORE_FILE, "from joblib.numpy_pickle import load", "imports joblib.numpy_pickle"),
    (executing_read, CORE_FILE, "x = 1\neval('x')", f"{CORE_FILE}:2: calls eval"),
    (executing_read, CORE_FILE, "torch.load(path)", "calls torch.load"),
    (
        executing_read,
        "clika_ref/serialization/atomic_files.py",
        "yaml.load(text, Loader=yaml.Loader)",
        "calls yaml.load, which runs",
    ),
    (executing_read, "clika_ref/module/clika_module.py", "eval(text)", "calls eval"),
    (executing_read, "clika_ref/serialization/atomic_files.py", "exec(text)", "calls exec"),
    (executing_read, CORE_FILE, "sympy.sympify(text)", "calls sympy.sympify"),
    (heavy_core, CORE_FILE, "import json\nimport numpy as np", f"{CORE_FILE}:2: imports numpy"),
    (heavy_core, CORE_FILE, "from clika_ref.capture import x", f"{CORE_FILE}:1: imports clika_ref.capture"),
    (heavy_core, CORE_FILE, "from ..capture import x", f"{CORE_FILE}:1: imports ..capture"),
    (shadowed_module, CORE_FILE, "def ir(): ...", f"{CORE_FILE}:1: ir is also the name of its module"),
    (shadowed_module, f"{CORE}/__init__.py", "from clika_ref.core.ir import core", "core is also the name"),
]

LAWFUL = [
    (long_file, CORE_FILE, "x = 1\n" * 400),
    (long_function, CORE_FILE, function_of(40)),
    (long_function, CORE_FILE, function_of(40, docstring=30)),
    (hidden_import, CORE_FILE, "from clika_ref.core import ir\ndef f():\n    import onnxruntime"),
    (vague_name, "clika_ref/core/basement.py", ""),
    (
        executing_read,
        CORE_FILE,
        "model.eval()\nsafetensors.torch.load(data)\nimport json\nyaml.compose(text, Loader=yaml.BaseLoader)",
    ),
    (executing_read, "clika_ref/core/fx_execution.py", "exec(compile(code.src, name, 'exec'))"),
    (heavy_core, CORE_FILE, "import json\nimport torch.fx\nfrom . import types\nfrom clika_ref.core import errors"),
    (heavy_core, "clika_ref/capture/tracing.py", "import numpy"),
    (shadowed_module, CORE_FILE, "import ir\nclass Graph: ..."),
    (shadowed_module, "clika_ref/capture/capture.py", "def capture(): ..."),
]


@pytest.mark.parametrize(("rule", "path", "source", "message"), BREACHES)
def test_rule_finds_violation(rule, path, source, message):
    """The rule finds the violation and its place."""
    found = list(rule(path, source))
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(("rule", "path", "source"), LAWFUL)
def test_rule_accepts_valid_code(rule, path, source):
    """The rule accepts the nearest valid code."""
    assert list(rule(path, source)) == []


def test_rules_all_have_violation_and_valid_example():
    """Every rule has an example of a violation and of valid code."""
    assert {rule for rule, *_ in BREACHES} == set(RULES) == {rule for rule, *_ in LAWFUL}


def test_over_budget_lists_lines_per_file():
    """A core over its budget is reported with the lines of each file."""
    halves = {f"{CORE}/a.py": "x\n" * (CORE_LINES // 2), f"{CORE}/b.py": "x\n" * (CORE_LINES // 2)}
    assert list(over_budget(halves)) == []
    (message,) = over_budget({**halves, f"{CORE}/c.py": "x\n", "clika_ref/module/clika_module.py": "x\n" * 9000})
    assert f"{CORE_LINES + 1} lines of code, 1 over the budget of {CORE_LINES}" in message
    assert f"{CORE}/c.py 1" in message


def test_code_lines_excludes_comments_and_docstrings():
    """Blank lines, comments and docstrings are not counted."""
    source = '''"""Module.

    More.
    """

# why
x = f(  # two lines of code
    1)
"""Of x."""


class A:
    """Class."""

    text = """a string
    is code"""

    def f(self):
        """Method."""
'''
    assert code_lines(source) == 6
