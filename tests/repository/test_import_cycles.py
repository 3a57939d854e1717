"""No module imports itself through others, counting imports inside functions and by name."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "clika_ref",
    "clika_ref_conformance",
    *sorted(path.name for path in (ROOT / "plugins").glob("*/clika_ref_*") if (path / "__init__.py").exists()),
]


def find_imports_by_name(source: str) -> Iterator[str]:
    """Yield the modules that a source imports with ``import_module`` or ``__import__`` and a constant name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value


def find_cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of several modules, and modules that import themselves.

    Source: R. Tarjan, Depth-first search and linear graph algorithms, 1972.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(imports.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            place = stack.index(module)
            component, stack[place:] = stack[place:], []
            if len(component) > 1 or module in imports.get(module, ()):
                found.append(sorted(component))

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return found


COPIED_SCRIPT = "clika_ref_conformance.reproducing.repro_script"
"""A file that is copied into archives and run there; it imports the suite by name if that is installed."""


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the modules of the project that each module imports anywhere in its file."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    for module in found.keys() - {COPIED_SCRIPT}:
        path = next(path for path in find_module_paths(module) if path.exists())
        found[module] |= {name for name in find_imports_by_name(path.read_text(encoding="utf-8")) if name in found}
    return found


def find_module_paths(module: str) -> Iterator[Path]:
    """Yield the files that a module may have in this repository."""
    top, _, rest = module.partition(".")
    homes = [ROOT, ROOT / "conformance", ROOT / "plugins" / top.removeprefix("clika_ref_")]
    for home in homes:
        place = home / top / rest.replace(".", "/")
        yield from (place / "__init__.py", place.with_suffix(".py"))


@pytest.mark.slow
def test_imports_of_all_packages_have_no_cycle(imports):
    assert find_cycles(imports) == []


def test_imports_inside_functions_and_by_name_are_counted(imports):
    """`api` imports the pipeline inside a function, and `generic_operators` imports torchlib by its name."""
    assert "clika_ref.pipeline" in imports["clika_ref.api"]
    assert "clika_ref.onnx_export.torchlib" in imports["clika_ref.onnx_export.generic_operators"]


def test_find_cycles_returns_components_and_self_imports():
    chain = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"e"}, "f": {"a"}}
    assert find_cycles(chain) == [["a", "b", "c"], ["e"]]
    assert find_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_by_name_reads_constant_names_only():
    source = "import_module('a.b')\nimportlib.import_module('c')\nimport_module(name)\nprint('d')"
    assert [*find_imports_by_name(source)] == ["a.b", "c"]
