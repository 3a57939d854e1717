"""Every public name is in the API reference, with its meaning, shapes, units and errors."""

import ast
import dataclasses
import enum
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pytest
from raised_errors import find_errors, parse_source

import clika_ref
from clika_ref import core

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/api").glob("*.md"))

ALIASES = {"ModelArgType", "AnyCallable"}
"""Public names of type aliases; the string below an alias is its docstring."""

SHAPE = re.compile(
    r"``[\w.]*\[[^\]]*\]|\bshapes?\b|\bsides?\b|\bfor each\b|\bper input\b|\b0-d\b|\binputs of\b|\belement"
)
"""Ways in which a docstring states the dims of a tensor: in brackets, by its shape, or as one per item."""

ELSEWHERE = "arguments mean what they mean to"
"""The phrase with which a docstring refers to another one for its arguments."""

EXCUSED = {
    "clika_ref.compiled.lowering.quantize_for_target": {
        "TargetError"
    },  # of forms of a file, of which it asks for the usual one
}
"""Errors that calls cannot raise for how they are made, though what they call does."""

UNITS = {
    r"seconds|timings": r"\bseconds?\b",
    r"bytes|size_limit": r"\bbytes\b|\bMB\b|\bGB\b",
    r"bits|widths": r"\bbits\b",
    r"sqnr": r"\bdB\b",
    r"sensitivity|threshold": r"\bshare\b|\bsquare\b|\bquantization_sensitivity_threshold\b|\bsensitiv",
    r"(^|_)rate$": r"\bshare\b",
}
"""Units that a docstring must state, by the names of parameters, fields and results."""


@dataclass(frozen=True)
class Public:
    """A public object and its name."""

    name: str
    found: Any

    @property
    def doc(self) -> str:
        own = self.found.fget if isinstance(self.found, property) else self.found
        return inspect.getdoc(own) or ""

    @property
    def code(self) -> Any:
        """The function that is run."""
        return self.found.fget if isinstance(self.found, property) else inspect.unwrap(self.found)

    @property
    def owner(self) -> type | None:
        """The class that it is a method of."""
        found = resolve(self.name.rpartition(".")[0])
        return found if inspect.isclass(found) else None

    @property
    def documentation(self) -> str:
        """Its docstring, and that of its class."""
        return self.doc + (inspect.getdoc(self.owner) or "" if self.owner else "")


def find_documented_names() -> list[str]:
    """Return the objects and modules that the pages show."""
    return [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)]


def resolve(name: str) -> Any:
    """Return the object of a dotted name."""
    return pkgutil.resolve_name(name)


def find_members(name: str, found: Any) -> Iterator[Public]:
    """Yield an object with its public members: own functions and classes of a module, methods of a class."""
    if inspect.ismodule(found):
        for key, value in vars(found).items():
            is_own = getattr(value, "__module__", None) == name and (inspect.isclass(value) or inspect.isroutine(value))
            if is_own and not key.startswith("_"):
                yield from find_members(f"{name}.{key}", value)
        return
    yield Public(name, found)
    if not inspect.isclass(found):
        return
    for owner in found.__mro__:
        if owner.__module__.startswith("clika_ref"):
            for key, value in vars(owner).items():
                unwrapped = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                unwrapped = property(value.func) if isinstance(value, cached_property) else unwrapped
                if not key.startswith("_") and (inspect.isroutine(unwrapped) or isinstance(unwrapped, property)):
                    yield Public(f"{name}.{key}", unwrapped)


@pytest.fixture(scope="module")
def public() -> list[Public]:
    """Every public object, once."""
    found = [p for name in find_documented_names() for p in find_members(name, resolve(name))]
    return [*{p.name: p for p in found if p.name.rpartition(".")[2] not in ALIASES}.values()]


def report_figure(what: str, count: int, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Print a figure, and fail with the names that reduce it."""
    with capsys.disabled():
        share = 100 * (1 - len(wrong) / count) if count else 100
        print(f"\n{what}: {count - len(wrong)} of {count}, {share:.1f} %")
    assert not wrong, "\n".join(wrong)


def test_api_pages_show_every_public_name_once():
    """Every public name is on one page of the API reference."""
    shown = find_documented_names()
    assert len(shown) == len(set(shown)), "shown twice, so that links to it lead to either"
    expected = {f"clika_ref.{home}.{name}" for name, home in clika_ref.MODULE_BY_PUBLIC_NAME.items()}
    assert expected - set(shown) == set()


def test_api_pages_show_every_core_module():
    """Every core module is on a page of the API reference."""
    shown = {name.rpartition(".")[0] if ".errors." in name else name for name in find_documented_names()}
    assert {f"clika_ref.core.{module.name}" for module in pkgutil.iter_modules(core.__path__)} - shown == set()


def test_public_names_have_docstring(public, capsys):
    """Every public name has a docstring."""
    wrong = [p.name for p in public if not p.doc.strip()]
    report_figure("public names with a docstring", len(public), wrong, capsys)


@pytest.mark.slow
def test_public_dataclass_fields_documented(public, capsys):
    """Every field of a public data class is documented."""
    fields = [
        (p, f"{p.name}.{field.name}", field.name)
        for p in public
        if inspect.isclass(p.found) and dataclasses.is_dataclass(p.found)
        for field in dataclasses.fields(p.found)
        if not field.name.startswith("_")
    ]
    wrong = [
        name
        for p, name, field in fields
        if field not in find_documented_fields(p.found) and not re.search(rf"\b{field}\b", p.doc, re.IGNORECASE)
    ]
    report_figure("fields with a sentence of their own, or in that of their class", len(fields), wrong, capsys)


def find_documented_fields(found: type) -> set[str]:
    """Return the fields of a class and its bases that are followed by a docstring."""
    names: set[str] = set()
    for owner in found.__mro__:
        if owner.__module__.startswith("clika_ref"):
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
            for line, following in itertools.pairwise(body):
                is_told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if is_told and isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    names.add(line.target.id)
    return names


def select_functions(public: list[Public]) -> list[Public]:
    """Return the functions, methods and properties among public names."""
    return [p for p in public if not inspect.isclass(p.found) and parse_source(p.code) is not None]


@pytest.mark.slow
def test_public_functions_list_raised_errors(public, capsys):
    """Every public function lists the errors that it raises."""
    raising = [(p, find_errors(p.code, p.owner)) for p in select_functions(public)]
    raising = [(p, errors - EXCUSED.get(p.name, set())) for p, errors in raising]
    raising = [(p, errors) for p, errors in raising if errors]
    wrong = [f"{p.name}: {e}" for p, errors in raising for e in sorted(errors) if not is_documented(e, p.documentation)]
    report_figure("functions that raise, and say so", len(raising), wrong, capsys)


def is_documented(error: str, text: str) -> bool:
    """Whether a docstring lists an error, or `ClikaError`."""
    return f"{error}:" in text or (error != "ValueError" and "ClikaError:" in text)


def test_api_index_documents_plugin_errors():
    """The index of the API documents the errors of plugins."""
    text = (ROOT / "docs/api/index.md").read_text("utf-8")
    assert "Functions that need plugins load them on the first call. They raise a\n  [`PluginError`]" in text


def test_public_functions_name_parameters(public, capsys):
    """The docstring of a public function names its parameters."""
    taking = [(p, name) for p in public for name in list_parameters(p)]
    wrong = [f"{p.name}: {name}" for p, name in taking if ELSEWHERE not in p.doc and not is_mentioned(name, p.doc)]
    report_figure("parameters that the docstring of their function names", len(taking), wrong, capsys)


def is_mentioned(parameter: str, text: str) -> bool:
    """Whether a text contains the name of a parameter, in singular or plural."""
    stem = parameter.strip("_").removesuffix("s").replace("_", "[_ ]")
    return re.search(rf"\b{stem}(?:s|es)?\b", text, re.IGNORECASE) is not None


def list_parameters(p: Public) -> list[str]:
    """Return the parameters of a function or class with several of them, without ``self``."""
    if isinstance(p.found, property) or dataclasses.is_dataclass(p.found) or is_exception_or_enum(p.found):
        return []  # fields are looked at by themselves
    made = p.found.__init__ if inspect.isclass(p.found) else inspect.unwrap(p.found)
    found = [name for name in inspect.signature(made).parameters if name not in ("self", "cls")]
    return found if len(found) > 1 and made is not object.__init__ else []


def is_exception_or_enum(found: Any) -> bool:
    """Whether a class is an exception, an enumeration or a protocol."""
    return inspect.isclass(found) and issubclass(found, Exception | enum.Enum | Protocol)


def test_public_functions_state_tensor_shapes(public, capsys):
    """The docstring of a function of tensors states their shapes."""
    taking = [p for p in select_functions(public) if "Tensor" in read_annotations(p)]
    wrong = [p.name for p in taking if not SHAPE.search(p.doc)]
    report_figure("functions of tensors that state shapes", len(taking), wrong, capsys)


def read_annotations(p: Public) -> str:
    """Return the types of a function's signature, as text."""
    own = p.found.fget if isinstance(p.found, property) else inspect.unwrap(p.found)
    return (
        " ".join(map(str, getattr(own, "__annotations__", {}).values()))
        .replace("TensorType", "")
        .replace("TensorSample", "")
    )


@pytest.mark.slow
def test_public_quantities_state_unit(public, capsys):
    """The docstring of a quantity states its unit."""
    quantities = [
        (p, name, unit) for p in public for name in list_names(p) for of, unit in UNITS.items() if re.search(of, name)
    ]
    wrong = [
        f"{p.name}: {name}" for p, name, unit in quantities if not re.search(unit, read_documentation(p), re.IGNORECASE)
    ]
    report_figure("quantities that state their unit", len(quantities), wrong, capsys)


def list_names(p: Public) -> list[str]:
    """Return the names of the parameters or fields of a public object, and its own if it is a property."""
    if inspect.isclass(p.found):
        return [f.name for f in dataclasses.fields(p.found)] if dataclasses.is_dataclass(p.found) else []
    return [p.name.rpartition(".")[2]] if isinstance(p.found, property) else list_parameters(p)


def read_documentation(p: Public) -> str:
    """The docstring of a public object, with those of its fields."""
    return f"{p.doc}\n{inspect.getsource(p.found)}" if inspect.isclass(p.found) else p.doc
