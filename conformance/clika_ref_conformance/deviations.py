"""Read and check ``deviations.toml``, the deviations from eager that a target declares.

The file is next to the module of the target or of its class, or at the path in the target's attribute ``deviations``.
Each ``[[deviation]]`` states the nodes and inputs that it concerns, and the behavior, in one of four forms:

- ``replace = { inf = "max" }``: elements of one kind in the result become another;
- ``free = ["nan"]``: elements of these kinds in the result may become anything. So may the same elements of other
  results of that shape, such as indices. With ``"operand-nan"``, the whole result is free if an operand holds a NaN;
- ``replica = "package.module:function"``: a function of the operator's arguments that computes the target's result;
- ``error = "regular expression"``: compiling, loading or running raises an error with matching text.

Each ``[[xfail]]`` names checks that fail for a known reason outside the target, and when to look again.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.requirements import InvalidRequirement, Requirement

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Node, Value
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref_conformance.cases import Task
from clika_ref_conformance.profiles import ALL_DTYPES, Profile

DEVIATIONS_FILE = "deviations.toml"

ELEMENT_KINDS = ("nan", "inf", "-inf", "0", "-0", "subnormal")
"""Kinds of elements that ``replace`` and ``free`` accept."""

SUBSTITUTE_ELEMENTS = ("nan", "inf", "-inf", "0", "-0", "max", "-max")
"""Replacement elements; ``max`` is the largest finite number of the dtype."""

DEVIATION_FORMS = ("replace", "free", "replica", "error")

DTYPE_NAMES = frozenset(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))


@dataclass(frozen=True)
class Deviation:
    """One declared deviation: the calls that it concerns, and the target's behavior there."""

    id: str
    operators: tuple[str, ...]
    reason: str
    link: str
    """Link to the report or documentation, or a sentence that explains why there is none."""
    expires: str
    """When to look again: a date, or a requirement such as ``onnxruntime>=1.40``."""
    since: str = ""
    dtypes: tuple[str, ...] = ()
    """At least one tensor of the node has one of these dtypes; any dtype if empty."""
    runs: tuple[str, ...] = ()
    """Patterns of the names of inputs; any inputs if empty."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dynamic: bool | None = None
    targets: tuple[str, ...] = ()
    replace: Mapping[str, str] = field(default_factory=dict[str, str])
    free: tuple[str, ...] = ()
    replica: str = ""
    error: str = ""

    def concerns(self, node: Node) -> bool:
        """Return whether the deviation may occur in a node."""
        if node.op.name not in self.operators:
            return False
        values = [v for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
        dtypes = {str(v.type.dtype).removeprefix("torch.") for v in values}
        return (
            (not self.dtypes or not dtypes.isdisjoint(self.dtypes))
            and (self.dynamic is None or self.dynamic != all(v.type.is_static for v in values))
            and all(_is_same_attribute(node.attrs.get(name), value) for name, value in self.attributes.items())
        )

    def is_reachable(self, profile: Profile) -> bool:
        """Return whether a profile plans calls in one of its dtypes; True if it names none, or an unjudged one."""
        return not self.dtypes or any(d in profile.dtypes or d not in ALL_DTYPES for d in self.dtypes)

    def concerns_run(self, name: str) -> bool:
        """Return whether the deviation may occur for the inputs of this name."""
        return not self.runs or any(fnmatchcase(name, pattern) for pattern in self.runs)

    def matches(self, error: BaseException) -> bool:
        """Return whether an error, or one in its chain of causes, is the declared one."""
        found: BaseException | None = error
        while found is not None:
            if self.error and re.search(self.error, str(found)):
                return True
            found = found.__cause__
        return False


@dataclass(frozen=True)
class ExpectedFailure:
    """Checks that fail for a known reason: ``[[xfail]]``."""

    task: str
    """Pattern of tasks, such as ``operators/sort/*``."""
    reason: str
    link: str
    expires: str
    check: str = "*"
    """Pattern of checks. A number in it that counts draws matches any number."""
    targets: tuple[str, ...] = ()

    def concerns(self, task: Task, check: str) -> bool:
        """Return whether a check of a task, given by name, is expected to fail."""
        exact = fnmatchcase(check, self.check)
        return self.matches_task(task) and (exact or fnmatchcase(_mask_counters(check), _mask_counters(self.check)))

    def matches_task(self, task: Task) -> bool:
        """Return whether any check of a task is expected to fail."""
        return fnmatchcase(str(task), self.task)

    @property
    def has_draw_counter(self) -> bool:
        """Whether it names draws by number. Other profiles and seeds draw other calls under the same number."""
        return bool(DRAW_COUNTER.search(self.check))

    def __str__(self) -> str:
        return f"xfail {self.task} {self.check}"


ExpectedFailureScopes = Mapping[ExpectedFailure, frozenset[Task]]
"""All tasks that each expected failure concerns, for any profile and seed."""


@dataclass(frozen=True)
class Declarations:
    """Everything that a target declares."""

    deviations: tuple[Deviation, ...] = ()
    xfails: tuple[ExpectedFailure, ...] = ()


def read_declarations(target: Target, registry: Registry, given: str = "") -> Declarations:
    """Read the declarations of a target; empty if it has no file.

    Args:
        target: loaded target.
        registry: operators, passes and targets that plugins provide.
        given: text that the user gave for the target. The module in ``package.module:TARGET`` may differ from that of
            the class.

    Raises:
        TargetError: the file cannot be read, or entries are invalid; the message lists all of them.
    """
    modules = _find_modules(target, given)
    path = _find_deviations_file(target, modules)
    if path is None:
        return Declarations()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetError(f"cannot read the declarations in {path}: {error}") from error
    reader = _DeclarationReader(registry, _find_known_targets(target, registry, modules))
    known = {"deviation": Deviation, "xfail": ExpectedFailure}
    reader.reject_unknown_keys(path.name, document, known)
    tables = {name: reader.read_tables(name, document.get(name, [])) for name in known}
    read = {name: [reader.read_entry(kind, table) for table in tables[name]] for name, kind in known.items()}
    reader.reject_duplicate_ids([table.get("id") for table in tables["deviation"]])
    if reader.problems:
        raise TargetError(
            f"cannot use the declarations in {path}: it has {len(reader.problems)} errors.\n"
            + "\n".join(f"  {p}" for p in reader.problems)
        )
    mine = {
        name: tuple(e for e in entries if not e.targets or target.name in e.targets) for name, entries in read.items()
    }
    return Declarations(mine["deviation"], mine["xfail"])


def _find_modules(target: Target, given: str) -> list[ModuleType]:
    """Return the module that the target was loaded from, and the module of its class."""
    module_name, colon, _ = given.partition(":")
    names = [module_name, type(target).__module__] if colon else [type(target).__module__]
    return [sys.modules[name] for name in names]


def _find_known_targets(target: Target, registry: Registry, modules: Sequence[ModuleType]) -> set[str]:
    """Return the target names that a file may use: installed targets, and those in the modules next to the file."""
    candidates = [v for module in modules for v in vars(module).values()]
    others = [v for v in candidates if isinstance(v, Target) or (isinstance(v, type) and issubclass(v, Target))]
    named = [getattr(v, "name", None) for v in others]  # a class may leave its name to its instances
    return {target.name, *registry.targets, *(name for name in named if isinstance(name, str))}


def _find_deviations_file(target: Target, modules: Sequence[ModuleType]) -> Path | None:
    if target.deviations is not None:
        return Path(target.deviations)
    files = [getattr(module, "__file__", None) for module in modules]
    candidates = [Path(file).with_name(DEVIATIONS_FILE) for file in files if file]
    return next((file for file in candidates if file.exists()), None)


class _DeclarationReader:
    """Parses tables into entries and collects all problems."""

    def __init__(self, registry: Registry, targets: Collection[str]) -> None:
        self.registry = registry
        self.targets = targets
        self.problems: list[str] = []

    def reject_unknown_keys(self, entry_name: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
        unknown = [name for name in table if name not in known]
        for name in unknown:
            self.problems.append(f"{entry_name}: unknown key {name!r}{_suggest_similar(name, known)}")
        return bool(unknown)

    def reject_duplicate_ids(self, names: Sequence[Any]) -> None:
        texts = [name for name in names if isinstance(name, str)]
        self.problems += [
            f"{name}: several entries have this id" for name in dict.fromkeys(texts) if texts.count(name) > 1
        ]

    def read_tables(self, name: str, entries: Any) -> list[dict[str, Any]]:
        if isinstance(entries, list) and all(isinstance(table, dict) for table in entries):
            return entries
        kind = "a single table" if isinstance(entries, dict) else f"{entries!r}"
        self.problems.append(f"{name} is {kind}, not an array of tables. Begin each entry with [[{name}]].")
        return []

    def read_entry(self, kind: type[Any], table: dict[str, Any]) -> Any:
        known = {f.name: f for f in fields(kind)}
        entry_name = str(table.get("id", table.get("task", "an entry without id")))
        if self.reject_unknown_keys(entry_name, table, known):
            return None
        required = [n for n in ("id", "operators", "task", "reason", "link", "expires") if n in known]
        lacking = [name for name in required if not table.get(name)]
        forms = {name: _toml_type_of(str(known[name].type)) for name in table}
        wrong = [name for name, value in table.items() if not _has_toml_type(forms[name], value)]
        self.problems += [f"{entry_name}: {name} is missing" for name in lacking]
        self.problems += [f"{entry_name}: {name} = {table[name]!r} must be {forms[name]}" for name in wrong]
        if lacking or wrong:
            return None
        entry = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in table.items()})
        self._check_expiry(entry_name, entry.expires)
        self._check_names(entry_name, "there is no target", entry.targets, self.targets)
        if isinstance(entry, Deviation):
            self._check(entry)
        return entry

    def _check_expiry(self, entry_name: str, text: str) -> None:
        try:
            is_expired(text)
        except (ValueError, InvalidRequirement):
            self.problems.append(
                f"{entry_name}: expires = {text!r} is neither a date (2027-01-31) nor a requirement (onnxruntime>=2)"
            )

    def _check_names(self, entry_name: str, problem: str, names: Sequence[str], known: Collection[str]) -> None:
        self.problems += [
            f"{entry_name}: {problem} {name!r}{_suggest_similar(name, known)}" for name in names if name not in known
        ]

    def _check(self, d: Deviation) -> None:
        forms = [form for form in DEVIATION_FORMS if getattr(d, form)]
        if len(forms) != 1:
            found = " and ".join(forms) or "none"
            self.problems.append(f"{d.id}: an entry needs one of {', '.join(DEVIATION_FORMS)}, and has {found}")
        self._check_names(d.id, "no plugin declares the operator", d.operators, self.registry.operators)
        self._check_names(d.id, "there is no dtype", d.dtypes, DTYPE_NAMES)
        for op in (self.registry.operators[name] for name in d.operators if name in self.registry.operators):
            self._check_names(d.id, f"{op.name} has no attribute", [*d.attributes], op.attributes)
        kinds = (*d.replace, *(k.removeprefix("operand-") for k in d.free))
        for label, names, known in (
            ("kind of element", kinds, ELEMENT_KINDS),
            ("replacement", d.replace.values(), SUBSTITUTE_ELEMENTS),
        ):
            unknown = [name for name in names if name not in known]
            self.problems += [f"{d.id}: unknown {label} {n!r}. Use one of {', '.join(known)}." for n in unknown]
        if d.replica and not re.fullmatch(r"[\w.]+:\w+", d.replica):
            self.problems.append(f"{d.id}: replica = {d.replica!r} is not of the form package.module:function")
        elif d.replica:
            self._check_replica(d)
        try:
            re.compile(d.error)
        except re.error as error:
            self.problems.append(f"{d.id}: error = {d.error!r} is not a regular expression: {error}")

    def _check_replica(self, d: Deviation) -> None:
        try:
            found = import_replica(d)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - importing a module may raise anything
            self.problems.append(f"{d.id}: replica = {d.replica!r} cannot be imported: {type(error).__name__}: {error}")
        else:
            if not callable(found):
                self.problems.append(f"{d.id}: replica = {d.replica!r} is {found!r}, which is not callable")


def import_replica(deviation: Deviation) -> Callable[..., Any]:
    """Import the function that reproduces the target's result."""
    module_name, _, name = deviation.replica.partition(":")
    return getattr(importlib.import_module(module_name), name)


def is_expired(text: str, today: dt.date | None = None) -> bool:
    """Return whether a date has passed, or whether the installed version of a distribution meets a requirement.

    Raises:
        ValueError: the text is neither a date nor a requirement.
    """
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return (today or dt.datetime.now(dt.UTC).date()) > dt.date.fromisoformat(text)
    requirement = Requirement(text)
    if not requirement.specifier:
        raise ValueError(text)
    try:
        return version(requirement.name) in requirement.specifier
    except PackageNotFoundError:
        return False


DRAW_COUNTER = re.compile(r"(?<=[a-z*?])-\d+(?![\w*?\[])")
"""Draw counter in a name (``drawn-17``), but no number of an operator (``conv2d``) or a format (``int4-7``)."""


@functools.cache
def _mask_counters(name: str) -> str:
    """Return a name with all counters equal, as other seeds change them."""
    return DRAW_COUNTER.sub("-#", name)


def _toml_type_of(annotation: str) -> str:
    """Return the TOML type of a field's values."""
    forms = {"tuple": "an array of strings", "Mapping": "a table", "bool": "true or false", "str": "a string"}
    return next(form for start, form in forms.items() if annotation.startswith(start))


def _has_toml_type(form: str, value: Any) -> bool:
    if form == "an array of strings":
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    return isinstance(value, {"a table": dict, "true or false": bool, "a string": str}[form])


def _is_same_attribute(actual: Any, stated: Any) -> bool:
    """Compare an attribute with its TOML form: lists stand for tuples, ``"None"`` for None, names for dtypes."""
    if isinstance(stated, list):
        return isinstance(actual, list | tuple) and [*actual] == stated
    if isinstance(stated, str) and not isinstance(actual, str):
        return str(actual).removeprefix("torch.") == stated
    return type(actual) is type(stated) and actual == stated


def _suggest_similar(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""
