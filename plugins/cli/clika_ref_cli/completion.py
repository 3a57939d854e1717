"""Shell completion for targets and option fields.

Our own plugins are not imported, since that imports PyTorch and takes two seconds. Other plugins are loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_type_hints

from clika_ref.core.hooks import ENTRY_POINT_GROUP
from clika_ref.settings.compile_options import TARGET_DISTRIBUTIONS, TARGET_SHORT_NAMES, ClikaCompileOptions

DISTRIBUTIONS_WITHOUT_TARGETS = frozenset(
    {"clika-ref-aten", "clika-ref-cleanup", "clika-ref-torchvision", "clika-ref-visualize"}
)
"""Our distributions that provide no targets."""


def complete_target(incomplete: str) -> list[str]:
    """Return the names and short names of installed targets with this prefix."""
    entries = list(entry_points(group=ENTRY_POINT_GROUP))
    installed = {_get_distribution(entry) for entry in entries}
    names = [name for name, distribution in TARGET_DISTRIBUTIONS.items() if distribution in installed]
    names += [short for short, name in TARGET_SHORT_NAMES.items() if name in names]
    known = {*TARGET_DISTRIBUTIONS.values(), *DISTRIBUTIONS_WITHOUT_TARGETS}
    for entry in entries:
        if _get_distribution(entry) not in known:
            names += _load_target_names(entry)
    return sorted(name for name in names if name.startswith(incomplete))


def complete_option(incomplete: str) -> list[str]:
    """Return ``name=`` for fields of `ClikaCompileOptions`, or ``name=value`` for fields with fixed values."""
    name, separator, _ = incomplete.partition("=")
    hints = get_type_hints(ClikaCompileOptions)
    if separator:
        values = ("true", "false") if hints.get(name) is bool else get_args(hints.get(name))
        candidates = [f"{name}={value}" for value in values if isinstance(value, str)]
    else:
        candidates = [f"{field.name}=" for field in dataclasses.fields(ClikaCompileOptions)]
    return [text for text in candidates if text.startswith(incomplete)]


def _get_distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""


def _load_target_names(entry: EntryPoint) -> list[str]:
    """Return the names of a plugin's targets; none if it fails to load, since a message would end up in the prompt."""
    registry: Any = importlib.import_module("clika_ref.core.registry")
    try:
        return list(registry.load_registry(entry.name).targets)
    except Exception:  # noqa: BLE001 - a plugin may raise anything; `clika-ref plugins` reports it
        return []
