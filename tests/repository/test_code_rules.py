"""Rules that no linter checks: sizes, names, positions of imports, and no execution of file contents."""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from releasing.distributions import list_files

ROOT = Path(__file__).parents[2]
PACKAGES = ("clika_ref", "plugins", "conformance")
"""The folders that every rule reads; rules on sizes read all Python files."""
CORE = "clika_ref/core"

FILE_LINES = 600
FUNCTION_LINES = 60
CORE_LINES = 2000  # of code: a budget on the manual would be paid with docstrings
TEST_NAME_LENGTH = 65  # CONTRIBUTING.md asks for about 60

CORE_IMPORTS = {"pluggy", "sympy", "torch"}
VAGUE = {"base", "bases", "common", "helper", "helpers", "manager", "managers", "util", "utils"}
EXECUTING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
EXECUTING_BUILTINS = {"eval", "exec"}
EXECUTING_CALLS = {"torch.load", "sympy.sympify", "sympy.parse_expr", "sympify", "parse_expr"}
EXECUTING_CALLS |= {f"yaml.{load}" for load in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all")}
# What is executed there is not read: torch.fx writes it from our own graph, of which no name goes in.
WRITTEN_BY_FX = {("clika_ref/core/fx_execution.py", "exec")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def count_lines(function: Function) -> int:
    """Return the number of lines from ``def`` to the end, without the docstring and the decorators."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def find_functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function of a module, including methods and nested functions."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def imported_modules(node: ast.AST) -> list[str]:
    """Return the modules that one import statement names; a relative import starts with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


def dotted_name(node: ast.AST) -> str:
    """Return ``a.b.c`` for the expression ``a.b.c``; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def find_bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a module binds at its top level by definition or from-import, and their lines."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node.lineno) for alias in node.names)


# Each rule takes a file's path from the root and its source, and yields one message for each breach.


def find_long_file(path: str, source: str) -> Iterator[str]:
    """Yield a message for a file with more than FILE_LINES lines."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, {lines - FILE_LINES} over the limit of {FILE_LINES}; cut it at its natural axis"


def find_long_functions(path: str, source: str) -> Iterator[str]:
    """Yield a message for each function with more than FUNCTION_LINES lines without its docstring."""
    for function in find_functions(ast.parse(source, path)):
        lines = count_lines(function)
        if lines > FUNCTION_LINES:
            yield (
                f"{path}:{function.lineno}: {function.name} has {lines} lines without its docstring, "
                f"{lines - FUNCTION_LINES} over the limit of {FUNCTION_LINES}"
            )


def find_long_test_names(path: str, source: str) -> Iterator[str]:
    """Yield a message for each test whose name has more than TEST_NAME_LENGTH characters."""
    for function in find_functions(ast.parse(source, path)):
        length = len(function.name)
        if function.name.startswith("test_") and length > TEST_NAME_LENGTH:
            yield (
                f"{path}:{function.lineno}: {function.name} has {length} characters, {length - TEST_NAME_LENGTH} over "
                f"the limit of {TEST_NAME_LENGTH}; move the sentence to the docstring"
            )


LATE = {
    ("clika_ref/api.py", "clika_ref.pipeline"),
    ("clika_ref/api.py", "clika_ref.partial_graphs.compilation"),
    ("clika_ref/settings/settings.py", "clika_ref.settings.yaml_reader"),
    ("clika_ref/settings/settings.py", "clika_ref.settings.yaml_writer"),
    *(
        ("plugins/visualize/clika_ref_visualize/plugin.py", f"clika_ref_visualize.{module}")
        for module in ("pictures.graph_drawing", "pictures.svg", "pictures.writing", "report.page")
    ),
    ("plugins/visualize/clika_ref_visualize/plugin.py", "clika_ref_visualize.report.report_builder"),
}
"""Allowed imports inside functions, with the time that they would add to each import of the API or each compilation.

The pipeline imports torch.export and sympy, which takes a second; pieces need Dynamo. Settings files need a parser
(20 ms), pictures and reports 25 modules (35 ms).
"""


def find_hidden_imports(path: str, source: str) -> Iterator[str]:
    """Yield a message for each import of the project inside a function, which hides a cycle or a misplaced fact."""
    breaches = {
        (node.lineno, name)
        for function in find_functions(ast.parse(source, path))
        for node in ast.walk(function)
        for name in imported_modules(node)
        if name.startswith((".", "clika_ref")) and (path, name) not in LATE
    }
    yield from (
        f"{path}:{line}: imports {name} inside a function; move it to the top" for line, name in sorted(breaches)
    )


def find_vague_names(path: str, source: str) -> Iterator[str]:
    """Yield a message for a module or folder called utils, helpers, manager, base or common, or similarly."""
    del source
    yield from (
        f"{path}: {part} does not describe the content. Name it after its content"
        for part in Path(path).with_suffix("").parts
        if part.strip("_") in VAGUE
    )


def find_executing_reads(path: str, source: str) -> Iterator[str]:
    """Yield a message for each call that executes read data: use safetensors, JSON and an allow-list instead."""
    for node in ast.walk(ast.parse(source, path)):
        for name in imported_modules(node):
            if name.split(".")[0] in EXECUTING_MODULES:
                yield f"{path}:{node.lineno}: imports {name}, which runs code while it reads"
        if not isinstance(node, ast.Call) or (path, dotted_name(node.func)) in WRITTEN_BY_FX:
            continue
        if dotted_name(node.func) in EXECUTING_BUILTINS | EXECUTING_CALLS:
            yield f"{path}:{node.lineno}: calls {dotted_name(node.func)}, which runs what it reads"


CORE_PACKAGES = ("clika_ref.core", "clika_ref.torch_internals")
"""The packages that the core may import of the project."""


def find_heavy_core_imports(path: str, source: str) -> Iterator[str]:
    """Yield a message for each import of the core beyond itself, private names of torch, and `CORE_IMPORTS`."""
    if not path.startswith(f"{CORE}/"):
        return
    for node in ast.walk(ast.parse(source, path)):
        for name in imported_modules(node):
            top = name.split(".")[0]
            inside = name.startswith((*CORE_PACKAGES, ".")) and not name.startswith("..")
            if not inside and top not in CORE_IMPORTS and top not in sys.stdlib_module_names:
                yield f"{path}:{node.lineno}: imports {name}; besides itself it has {', '.join(sorted(CORE_IMPORTS))}"


def find_shadowed_modules(path: str, source: str) -> Iterator[str]:
    """Yield a message for a core module with the name of a public object, which makes imports ambiguous."""
    if not path.startswith(f"{CORE}/"):
        return
    module = Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem
    for name, line in find_bound_names(ast.parse(source, path)):
        if name == module:
            yield f"{path}:{line}: {name} is also the name of its module; rename one of the two"


SLOW_FIXTURES = {"browser", "open_page"}


def find_unmarked_processes(path: str, source: str) -> Iterator[str]:
    """Yield a message for each test that starts a process or opens a browser and is not marked ``slow``."""
    if "tests" not in Path(path).parts:
        return
    tree = ast.parse(source, path)
    if any("pytestmark" in ast.unparse(line) and "mark.slow" in ast.unparse(line) for line in tree.body):
        return
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    pages = SLOW_FIXTURES | {f.name for f in functions if SLOW_FIXTURES & {argument.arg for argument in f.args.args}}
    for function in functions:
        names = {dotted_name(node).split(".")[0] for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        is_slow = "subprocess" in names or pages & {argument.arg for argument in function.args.args}
        is_marked = any("mark.slow" in ast.unparse(mark) for mark in function.decorator_list)
        if function.name.startswith("test_") and is_slow and not is_marked:
            yield f"{path}:{function.lineno}: {function.name} starts a process or a browser; mark it slow"


SIZE_RULES = [find_long_file, find_long_functions, find_long_test_names]

RULES = [
    *SIZE_RULES,
    find_hidden_imports,
    find_vague_names,
    find_executing_reads,
    find_heavy_core_imports,
    find_shadowed_modules,
    find_unmarked_processes,
]


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def count_code_lines(source: str) -> int:
    """Count lines of code, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def find_budget_excess(sources: dict[str, str]) -> Iterator[str]:
    """Yield a message if the core has more than CORE_LINES lines of code."""
    lines = {path: count_code_lines(source) for path, source in sources.items() if path.startswith(f"{CORE}/")}
    total = sum(lines.values())
    if total > CORE_LINES:
        shares = ", ".join(f"{path} {count}" for path, count in sorted(lines.items(), key=lambda item: -item[1]))
        yield f"{CORE}: {total} lines of code, {total - CORE_LINES} over the budget of {CORE_LINES}: {shares}"


CLASS_NAME_FOLDERS = (
    "clika_ref/",
    "plugins/",
    "conformance/clika_ref_conformance/",
    "benchmarks/",
    "examples/",
    "docs/",
)

REPEATED_CLASS_NAMES: dict[str, str] = {}
"""Class names that have several meanings, each with the reason."""


def find_repeated_class_names(sources: dict[str, str]) -> dict[str, str]:
    """Return a message for each class name that product code defines twice, with and without leading underscores."""
    places = defaultdict(list)
    for path, source in sources.items():
        if path.startswith(CLASS_NAME_FOLDERS) and "tests" not in Path(path).parts:
            for node in ast.walk(ast.parse(source, path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    return {
        name: f"class {name} is defined in {', '.join(found)}; rename all but one to what each of them is"
        for name, found in places.items()
        if len(found) > 1
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The source of every Python file that git tracks, or would, by its path from the root."""
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in list_files(ROOT, "*.py")}


def test_sources_cover_core_plugins_and_conformance(sources):
    """The rules see the core, every plugin, the conformance suite and the folders without distributions."""
    folders = [path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")]
    assert folders
    expected = [CORE, "conformance/clika_ref_conformance", *(f"plugins/{name}/clika_ref_{name}" for name in folders)]
    expected += ["tests/repository", "benchmarks", "releasing", "examples", "docs/building"]
    missing = [folder for folder in expected if not any(path.startswith(f"{folder}/") for path in sources)]
    assert not missing, f"no Python file found in {missing}: a rule over nothing always holds"


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_repository_keeps_rule(rule: Callable[[str, str], Iterator[str]], sources):
    """Every file of the repository keeps the rules on sizes, and every file of a distribution the other rules."""
    folders = ("",) if rule in (*SIZE_RULES, find_unmarked_processes) else tuple(f"{folder}/" for folder in PACKAGES)
    breaches = [m for path, source in sources.items() if path.startswith(folders) for m in rule(path, source)]
    assert not breaches, f"{rule.__doc__}\n" + "\n".join(breaches)


def test_core_within_line_budget(sources):
    """The core keeps its line budget."""
    breaches = list(find_budget_excess(sources))
    assert not breaches, breaches[0]


@pytest.mark.slow
def test_product_code_class_names_have_one_meaning(sources):
    """No class name is defined twice in product code, except those of the table, which are all needed."""
    found = find_repeated_class_names(sources)
    breaches = [message for name, message in found.items() if name not in REPEATED_CLASS_NAMES]
    assert not breaches, "\n".join(breaches)
    assert REPEATED_CLASS_NAMES.keys() <= found.keys(), "a name of the table has one meaning now; remove it there"


# The rules themselves: each finds its breach, with its position and size, and accepts the nearest valid case.


def make_function_source(lines: int, docstring: int = 0) -> str:
    """The source of a function of so many lines, plus a docstring of so many."""
    text = ['    """Say.', *["    more"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join(["@decorated", "def f():", *text, *["    x = 1"] * (lines - 1)])


CORE_FILE = f"{CORE}/ir.py"

BREACHES = [
    (find_long_file, CORE_FILE, "x = 1\n" * 601, f"{CORE_FILE}: 601 lines, 1 over the limit of 600"),
    (find_long_functions, CORE_FILE, make_function_source(61), f"{CORE_FILE}:2: f has 61 lines"),
    (find_long_functions, CORE_FILE, make_function_source(62, docstring=9), f"{CORE_FILE}:2: f has 62 lines"),
    (
        find_long_functions,
        CORE_FILE,
        make_function_source(61).replace("def", "async def"),
        f"{CORE_FILE}:2: f has 61 lines",
    ),
    (
        find_long_test_names,
        "tests/core/test_ir.py",
        f"class A:\n    def test_{'x' * 61}(self): ...",
        "tests/core/test_ir.py:2: test_",
    ),
    (
        find_hidden_imports,
        CORE_FILE,
        "def f():\n    from clika_ref.core import ir",
        f"{CORE_FILE}:2: imports clika_ref.core",
    ),
    (
        find_hidden_imports,
        CORE_FILE,
        "def f():\n    if x:\n        import clika_ref_aten",
        "ir.py:3: imports clika_ref_aten",
    ),
    (
        find_hidden_imports,
        "clika_ref/pipeline.py",
        "def f():\n    import clika_ref.pipeline",
        "clika_ref/pipeline.py:2: imports clika_ref.pipeline",
    ),
    (find_hidden_imports, CORE_FILE, "class A:\n    def f(self):\n        from . import ir", "ir.py:3: imports ."),
    (find_vague_names, "clika_ref/capture/utils.py", "", "utils does not describe"),
    (find_vague_names, "clika_ref/_common/names.py", "", "_common does not describe"),
    (
        find_unmarked_processes,
        "tests/api/test_main.py",
        "def test_a():\n    subprocess.run(['a'])",
        "tests/api/test_main.py:1: test_a starts a process",
    ),
    (
        find_unmarked_processes,
        "tests/api/test_main.py",
        "@pytest.fixture\ndef page(open_page): ...\ndef test_a(page): ...",
        "tests/api/test_main.py:3: test_a starts a process",
    ),
    (find_executing_reads, CORE_FILE, "import pickle", f"{CORE_FILE}:1: imports pickle"),
    (find_executing_reads, CORE_FILE, "from joblib.numpy_pickle import load", "imports joblib.numpy_pickle"),
    (find_executing_reads, CORE_FILE, "x = 1\neval('x')", f"{CORE_FILE}:2: calls eval"),
    (find_executing_reads, CORE_FILE, "torch.load(path)", "calls torch.load"),
    (
        find_executing_reads,
        "clika_ref/serialization/atomic_files.py",
        "yaml.load(text, Loader=yaml.Loader)",
        "calls yaml.load, which runs",
    ),
    (find_executing_reads, "clika_ref/module/clika_module.py", "eval(text)", "calls eval"),
    (find_executing_reads, "clika_ref/serialization/atomic_files.py", "exec(text)", "calls exec"),
    (find_executing_reads, CORE_FILE, "sympy.sympify(text)", "calls sympy.sympify"),
    (find_heavy_core_imports, CORE_FILE, "import json\nimport numpy as np", f"{CORE_FILE}:2: imports numpy"),
    (
        find_heavy_core_imports,
        CORE_FILE,
        "from clika_ref.capture import x",
        f"{CORE_FILE}:1: imports clika_ref.capture",
    ),
    (find_heavy_core_imports, CORE_FILE, "from ..capture import x", f"{CORE_FILE}:1: imports ..capture"),
    (find_shadowed_modules, CORE_FILE, "def ir(): ...", f"{CORE_FILE}:1: ir is also the name of its module"),
    (find_shadowed_modules, f"{CORE}/__init__.py", "from clika_ref.core.ir import core", "core is also the name"),
]

LAWFUL = [
    (find_long_file, CORE_FILE, "x = 1\n" * 400),
    (find_long_functions, CORE_FILE, make_function_source(40)),
    (find_long_functions, CORE_FILE, make_function_source(40, docstring=30)),
    (find_long_test_names, "tests/core/test_ir.py", f"def test_{'x' * 60}(): ...\ndef {'f' * 80}(): ..."),
    (find_hidden_imports, CORE_FILE, "from clika_ref.core import ir\ndef f():\n    import onnxruntime"),
    (find_vague_names, "clika_ref/core/basement.py", ""),
    (
        find_executing_reads,
        CORE_FILE,
        "model.eval()\nsafetensors.torch.load(data)\nimport json\nyaml.compose(text, Loader=yaml.BaseLoader)",
    ),
    (find_executing_reads, "clika_ref/core/fx_execution.py", "exec(compile(code.src, name, 'exec'))"),
    (
        find_heavy_core_imports,
        CORE_FILE,
        "import json\nimport torch.fx\nfrom . import types\nfrom clika_ref.core import errors",
    ),
    (find_heavy_core_imports, "clika_ref/capture/tracing.py", "import numpy"),
    (find_shadowed_modules, CORE_FILE, "import ir\nclass Graph: ..."),
    (find_shadowed_modules, "clika_ref/capture/capture.py", "def capture(): ..."),
    (find_unmarked_processes, "tests/api/test_main.py", "@pytest.mark.slow\ndef test_a():\n    subprocess.run(['a'])"),
    (find_unmarked_processes, "tests/api/test_main.py", "pytestmark = pytest.mark.slow\ndef test_a(open_page): ..."),
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


def test_repeated_class_names_lists_paths():
    """A repeated name is reported with its paths, private and nested classes too, but not those of tests."""
    files = {
        "clika_ref/a.py": "class A: ...\nclass B: ...",
        "examples/b.py": "def f():\n    class _A: ...",
        "plugins/aten/tests/c.py": "class B: ...",
        "tests/d.py": "class B: ...",
    }
    assert find_repeated_class_names(files) == {
        "A": "class A is defined in clika_ref/a.py:1, examples/b.py:2; rename all but one to what each of them is"
    }


def test_over_budget_lists_lines_per_file():
    """A core over its budget is reported with the lines of each file."""
    halves = {f"{CORE}/a.py": "x\n" * (CORE_LINES // 2), f"{CORE}/b.py": "x\n" * (CORE_LINES // 2)}
    assert list(find_budget_excess(halves)) == []
    (message,) = find_budget_excess({**halves, f"{CORE}/c.py": "x\n", "clika_ref/module/clika_module.py": "x\n" * 9000})
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
    assert count_code_lines(source) == 6
