"""Public signatures: top-level names, the interface of plugins, hooks, settings, commands and entry points."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import clika_ref
from releasing.baseline.command_options import describe_commands
from releasing.baseline.messages import normalize_text
from releasing.baseline.result_types import describe_results
from releasing.distributions import ROOT

PACKAGE = "clika_ref"
CORE = f"{PACKAGE}.core"

SOURCES_OF_PLUGINS = ("plugins/*/clika_ref_*/**/*.py", "conformance/clika_ref_conformance/**/*.py", "examples/*.py")
"""Code that uses the package as a plugin or a user does: whatever it imports from the package is public."""

SPECIFICATION_MARK = f"{PACKAGE}_spec"
"""The attribute by which pluggy marks a hook specification."""

VALUE_LENGTH = 200
"""A longer default or constant is cut: its beginning shows a change well enough."""

SET_PATTERN = re.compile(r"\{([^{}:]*)\}")
"""A set of names, as Python writes it."""

Signatures = dict[str, str]


def record_signatures() -> dict[str, Signatures]:
    """Return the text of each public signature under its name, by kind."""
    return {
        "top level": dict(_describe_top_level()),
        "plugin interface": dict(_describe_plugin_interface()),
        "hooks": dict(_describe_hooks()),
        "settings file": dict(_describe_settings_file()),
        "results": describe_results(),
        "commands": describe_commands(),
        "entry points": dict(_describe_entry_points()),
    }


def _describe_top_level() -> Iterator[tuple[str, str]]:
    for name in clika_ref.__all__:
        yield from describe(name, getattr(clika_ref, name))


def _describe_plugin_interface() -> Iterator[tuple[str, str]]:
    """Yield the public names of the core, and those of other modules that plugins import."""
    names = {f"{module}.{name}" for module in _modules_of_core() for name in _find_defined_names(module)}
    for path in sorted(names | set(_collect_plugin_imports())):
        module, _, name = path.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            yield path, normalize_text(f"cannot be imported: {error}")
            continue
        if not inspect.ismodule(value):
            yield from describe(path, value)


def _modules_of_core() -> Iterator[str]:
    """Yield the names of the public modules of the core. There are none if it moves."""
    try:
        core = importlib.import_module(CORE)
    except ImportError:
        return
    for found in pkgutil.walk_packages(core.__path__, f"{CORE}."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield found.name


def _find_defined_names(module: str) -> Iterator[str]:
    """Yield the public names that the source of a module binds at its top level, imports left out."""
    file = importlib.import_module(module).__file__
    assert file is not None
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_"))


def _collect_plugin_imports() -> Iterator[str]:
    """Yield the full names that plugins, the conformance suite and examples import from the package."""
    for pattern in SOURCES_OF_PLUGINS:
        for path in ROOT.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("_"))


def _describe_hooks() -> Iterator[tuple[str, str]]:
    """Yield the hook specifications, wherever in the package they are."""
    for found in pkgutil.walk_packages(clika_ref.__path__, f"{PACKAGE}."):
        if "hooks" in found.name and not found.name.startswith("_"):
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                if hasattr(value, SPECIFICATION_MARK):
                    yield name, f"{inspect.signature(value)}"


def _describe_settings_file() -> Iterator[tuple[str, str]]:
    """Yield the fields that a settings file has, with their defaults."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        clika_ref.Settings().save_to_path(path)
        sections = YAML(typ="safe", pure=True).load(path)
    for section, fields in sections.items():
        for name, value in fields.items() if isinstance(fields, dict) else [("", fields)]:
            yield f"{section}.{name}".rstrip("."), repr(value)


def _describe_entry_points() -> Iterator[tuple[str, str]]:
    for distribution in importlib.metadata.distributions():
        for entry in distribution.entry_points:
            if entry.value.startswith(PACKAGE):
                yield f"{entry.group}: {entry.name}", entry.value


def describe(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the signature of a function or the value of a constant; of a class also those of its public members."""
    if not inspect.isclass(value):
        yield name, _describe_value(value)
        return
    known = {id(getattr(clika_ref, public)) for public in clika_ref.__all__}
    bases = [c.__name__ for c in value.__mro__[1:-1] if id(c) in known or not c.__module__.startswith(PACKAGE)]
    yield name, f"class({', '.join(bases)}), made by {_signature(value)}"
    for member, found in sorted(_members_of(value).items()):
        yield f"{name}.{member}", found


def _members_of(kind: type) -> dict[str, str]:
    """Return the public members of a class and of its bases in our packages, under the names that users write."""
    if issubclass(kind, enum.Enum):
        return {member.name: repr(member.value) for member in kind}
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith(PACKAGE):
            annotated = {name: f"{text}" for name, text in inspect.get_annotations(owner).items()}
            members = {name: _describe_member(value) for name, value in vars(owner).items()}
            found |= annotated | members
    found |= {field.name: _describe_field(field) for field in _fields_of(kind)}
    return {name: text for name, text in found.items() if not name.startswith("_")}


def _fields_of(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _describe_field(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.type} = {_describe_value(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.type} = {_describe_value(field.default_factory())}"
    return f"{field.type}"


def _describe_member(value: Any) -> str:
    if isinstance(value, property):
        return f"property{_signature(value.fget)}"
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__}{_signature(value.__func__)}"
    return _describe_value(value)


def _describe_value(value: Any) -> str:
    if inspect.isroutine(value):
        return _signature(value)
    # Sets are in another order in each process.
    text = SET_PATTERN.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", normalize_text(f"{value!r}"))
    return text if len(text) <= VALUE_LENGTH else f"{text[:VALUE_LENGTH]}..."


def _signature(value: Any) -> str:
    try:
        return normalize_text(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(?)"
