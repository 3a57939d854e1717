"""A private attribute of the project is used only in the file whose classes or functions own it."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from fenced_blocks import PAGES, read_blocks

ROOT = Path(__file__).parents[2]
FOLDERS = ("clika_ref", "plugins", "conformance/clika_ref_conformance", "benchmarks", "releasing", "examples")

ALLOWED = {
    "_check": "`torch._check`, a documented function of torch, has the name of methods of ours",
    "_repr_html_": "the protocol of IPython, which calls it on any object",
}
"""Names of ours that are also private names of libraries, each with its reason."""


def is_private(name: str) -> bool:
    """Return whether a name starts with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def find_owned_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the classes of a file define: methods, class variables, slots and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (member for statement in node.body for member in find_bound_names(statement))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def find_bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a class body binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        yield from names
        if names == ["__slots__"]:
            yield from ast.literal_eval(statement.value)


def is_own(owner: ast.expr) -> bool:
    """Return whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in {"self", "cls"}


def find_private_uses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, name and text of each use of a private attribute of another object, also with ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            yield node.lineno, node.attr, ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr"}:
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, str(name), ast.unparse(node)) for name in names if not is_own(node.args[0]))


def find_private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each private name that a file imports from the project, or reads from its modules."""
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clika_ref"):
            ours |= {alias.asname or alias.name for alias in node.names}
            yield from ((node.lineno, f"import of {alias.name}") for alias in node.names if is_private(alias.name))
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours
        if is_read and is_private(node.attr):
            yield node.lineno, ast.unparse(node)


def find_foreign_uses(sources: dict[str, str], allowed: Iterable[str] = ()) -> Iterator[str]:
    """Yield a message for each private attribute or name that a file uses and only other files define."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    owners: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name in filter(is_private, find_owned_names(tree)):
            owners[name].add(path)
    for path, tree in trees.items():
        for line, name, text in find_private_uses(tree):
            if is_private(name) and name in owners and path not in owners[name] and name not in allowed:
                yield f"{path}:{line}: {text} is private to {', '.join(sorted(owners[name]))}; give it a public method"
        for line, text in find_private_imports(tree):
            yield f"{path}:{line}: {text} is private to another module; make it public there"


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return our Python files, and the python blocks of each page of the documentation as one file."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    skipped = {"build", "tests", "mutants"}  # tests and mutants break private parts on purpose
    named = {path.relative_to(ROOT): path for path in paths}
    found = {p.as_posix(): path.read_text(encoding="utf-8") for p, path in named.items() if not skipped & {*p.parts}}
    for page in PAGES:
        for block in read_blocks(page):
            if block.language == "python":
                prompts = [line[4:] for line in block.text.splitlines() if line.startswith((">>> ", "... "))]
                found[block.location] = "\n".join(prompts) if block.first.startswith(">>>") else block.text
    return {name: text for name, text in found.items() if is_parsed(text)}


def is_parsed(text: str) -> bool:
    """Return whether a text is Python: a block of a page may be an excerpt of a class, which a test compares."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_sources_contain_every_package_and_page_blocks(sources):
    assert sum(name.startswith("clika_ref/") for name in sources) > 200
    assert {"clika_ref/core/ir.py", "plugins/openvino/clika_ref_openvino/target.py", "benchmarks/stages.py"} <= {
        *sources
    }
    assert any(name.startswith("docs/") for name in sources)


@pytest.mark.slow
def test_private_attributes_are_used_by_their_owners_only(sources):
    assert [*find_foreign_uses(sources, ALLOWED)] == []


@pytest.mark.slow
def test_every_exception_is_still_needed(sources):
    found = [*find_foreign_uses(sources)]
    assert [name for name in ALLOWED if not any(f".{name} " in message for message in found)] == []


OWNER = "class A:\n    _kept: int\n    def __init__(self):\n        self._count = 0\n    def _grow(self): ...\n"


@pytest.mark.parametrize(
    "text",
    ["a._count", "a._grow()", "x.y()._kept", "self.a._count", "getattr(a, '_count', 0)", "setattr(a, '_count', 1)"],
)
def test_private_attribute_of_another_file_is_found(text):
    (message,) = find_foreign_uses({"owner.py": OWNER, "user.py": f"\n{text}"})
    assert message.startswith("user.py:2: ")
    assert message.endswith("is private to owner.py; give it a public method")


@pytest.mark.parametrize(
    "text", ["from clika_ref.core.ir import _type_of", "from clika_ref.core import ir\nir._type_of"]
)
def test_private_name_of_another_module_is_found(text):
    (message,) = find_foreign_uses({"user.py": text})
    assert "_type_of is private to another module; make it public there" in message


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("owner.py", f"{OWNER}\ndef f(a): return a._count"),
        ("user.py", "class B(A):\n    def f(self): return self._count, super()._grow()"),
        ("user.py", "x._backward_hooks"),  # none of our classes defines it
        ("user.py", "from clika_ref.core import ir\nir.Graph, ir.__name__\nfrom torch import _C"),
        ("user.py", "a.__dict__, a.count, _count"),
    ],
)
def test_own_and_foreign_private_attributes_pass(path, text):
    assert [*find_foreign_uses({"owner.py": OWNER, path: text})] == []
