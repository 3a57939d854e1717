"""Convert one section of a settings file into a dataclass, with the dataclass's own checks on each field."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args, get_type_hints

from clika_ref.core.errors import ModelError
from clika_ref.settings.compile_options import find_required_arguments
from clika_ref.settings.validation import CheckedSettings, describe_valid_values, find_similar_names
from clika_ref.settings.yaml_tree import Entry, Problems, parse_scalar

YAML_1_1_BOOLEANS = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
"""Booleans of YAML 1.1, used for boolean fields only: other fields accept such words as text."""

UNQUOTED_HINT = " Write it without quotes."


def is_mapping(entry: Entry, where: str, problems: Problems) -> bool:
    """Whether an entry is a mapping; adds a problem if not."""
    if isinstance(entry.value, dict):
        return True
    problems.add(entry.line, f"{where} is {describe_entry(entry)}. Give names and values below it, indented.")
    return False


def describe_entry(entry: Entry) -> str:
    """Return an entry in short form: with aliases, its full text could exceed any memory."""
    if isinstance(entry.value, list | dict):
        return "a list" if isinstance(entry.value, list) else "a mapping"
    return repr(entry.value)


def unknown_name_message(name: str, where: str, known: Iterable[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """Return the message for an unknown name, with similar names or the section that it belongs to.

    Args:
        name: the unknown name.
        where: the section.
        known: names of this section.
        elsewhere: names of other sections, by section.
    """
    known = [*known]
    near = find_similar_names(name, known, limit=2)
    homes = [section for section, names in elsewhere.items() if name in names]
    if homes:
        hint = f"It belongs to {' or '.join(homes)}."
    elif near:
        hint = f"Did you mean {' or '.join(map(repr, near))}?"
    else:
        hint = f"Its names are {', '.join(known)}." if known else "It has no settings."
    return f"{where} has no {name!r}. {hint}"


def read_section(
    kind: type, entry: Entry, where: str, problems: Problems, elsewhere: Mapping[str, Collection[str]]
) -> Any:
    """Return the settings of a section, or None if they are invalid.

    Args:
        kind: the dataclass.
        entry: the entry with its fields; empty for all defaults.
        where: the section, for messages.
        problems: receives all errors.
        elsewhere: names of other sections, by section.
    """
    if entry.value is None and not entry.is_quoted:
        return kind()
    if not is_mapping(entry, where, problems):
        return None
    fields: Mapping[str, Entry] = entry.value or {}
    before, hints = len(problems.found), get_type_hints(kind)
    names, values = [f.name for f in dataclasses.fields(kind)], dict[str, Any]()
    for name, field_entry in fields.items():
        if name not in names:
            problems.add(field_entry.line, unknown_name_message(name, where, names, elsewhere))
            continue
        values[name] = _convert_value(field_entry, hints[name])
        wrong = _field_error(kind, where, name, values[name])
        if wrong:
            is_number = field_entry.is_quoted and not isinstance(parse_scalar(field_entry.text), str)
            problems.add(field_entry.line, f"{wrong}{UNQUOTED_HINT if is_number else ''}")
    lacking = [name for name in find_required_arguments(kind) if name not in fields]
    if lacking:
        problems.add(
            entry.line, f"{where} lacks {', '.join(lacking)}, which have no default in {kind.__qualname__}. Give them."
        )
    if len(problems.found) > before:
        return None
    try:
        return kind(**values)
    except ModelError as error:
        problems.add(entry.line, f"{where}: {error}")
        return None


def _convert_value(entry: Entry, hint: Any) -> Any:
    """Return the value of an entry for a field of the given type."""
    if isinstance(entry.value, dict):
        flat = {name: _flatten(item) for name, item in entry.value.items()}
        return {name: tuple(item) if isinstance(item, list) else item for name, item in flat.items()}  # sizes of dims
    if isinstance(entry.value, list):
        return _flatten(entry)
    return parse_flag(entry) if bool in (hint, *get_args(hint)) else entry.value


def parse_flag(entry: Entry) -> Any:
    """Return the value of a switch, including the booleans of YAML 1.1."""
    word = None if entry.is_quoted else YAML_1_1_BOOLEANS.get(entry.text.lower())
    return entry.value if word is None else word


def _field_error(kind: type, where: str, name: str, value: Any) -> str:
    """Return the error in one field, regardless of the others; empty if it is valid."""
    if issubclass(kind, CheckedSettings):
        accepted = describe_valid_values(kind, name, value)
        return f"{where}.{name} is {value!r}. Give {accepted}." if accepted else ""
    if {*find_required_arguments(kind)} - {name}:  # constructing it reports the error, but without the line
        return ""
    try:
        kind(**{name: value})
    except ModelError as error:
        return f"{where}: {error}"
    return ""


def _flatten(entry: Entry) -> Any:
    """Return a scalar or a list of scalars. No field accepts deeper values, so these become a description."""
    if isinstance(entry.value, list):
        return [describe_entry(item) if isinstance(item.value, list | dict) else item.value for item in entry.value]
    return describe_entry(entry) if isinstance(entry.value, dict) else entry.value
