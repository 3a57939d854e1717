"""Shell completion for targets and option fields.

Our own plugins are listed without importing them, which would take PyTorch and two seconds. Others are loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_type_hints

from clika_ref.core.hooks import ENTRY_POINT_GROUP
from clika_ref.settings.compile_options import TARGET_DISTRIBUTIONS, TARGET_SHORT_NAMES, ClikaCompileOptions

DISTRIBUTIONS_WITHOUT_TARGETS = frozenset({"clika-ref-aten", "clika-ref-cleanup", "clika-ref-visualize"})
"""Our distributions that provide no targets."""


def complete_target(incomplete: str) -> list[str]:
    """Return the names and short names of installed targets with this prefix."""
    found = list(entry_points(group=ENTRY_POINT_GROUP))
    ours = {_owner(entry) for entry in found}
    names = [name for name, distribution in TARGET_DISTRIBUTIONS.items() if distribution in ours]
    names += [short for short, name in TARGET_SHORT_NAMES.items() if name in names]
    known = {*TARGET_DISTRIBUTIONS.values(), *DISTRIBUTIONS_WITHOUT_TARGETS}
    for entry in found:
        if _owner(entry) not in known:
            names += _targets_of(entry)
    return sorted(name for name in names if name.startswith(incomplete))


def complete_option(incomplete: str) -> list[str]:
    """Return ``name=`` for fields of `ClikaCompileOptions`, or ``name=value`` for fields with fixed choices."""
    name, is_named, _ = incomplete.partition("=")
    hints = get_type_hints(ClikaCompileOptions)
    if is_named:
        values = ("true", "false") if hints.get(name) is bool else get_args(hints.get(name))
        offered = [f"{name}={value}" for value in values if isinstance(value, str)]
    else:
        offered = [f"{field.name}=" for field in dataclasses.fields(ClikaCompileOptions)]
    return [text for text in offered if text.startswith(incomplete)]


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""


def _targets_of(entry: EntryPoint) -> list[str]:
    """Return the names of a plugin's targets; none if it fails to load, since a message would end up in the prompt."""
    registry: Any = importlib.import_module("clika_ref.core.registry")
    try:
        return list(registry.load_registry(entry.name).targets)
    except Exception:  # noqa: BLE001 - a plugin may raise anything; `clika-ref plugins` reports it
        return []
