"""Settings that validate their fields on every assignment."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.core.errors import ModelError

RENAMED_OPTIONS: Mapping[str, str] = {
    "smoothing": "smooth_quant",
    "sparing": "mixed_precision",
    "weight_rounding": "gptq",
}
"""Options of development versions and their present names, for suggestions only."""

MIN_SIMILARITY = 0.5
"""Minimum similarity of a suggestion; ``quantisation`` and ``global_quantization_settings`` have 0.55."""


def find_similar_names(name: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """Return known names to suggest for an unknown one: the new name of a renamed option, or similar names.

    Args:
        name: the unknown name.
        known: the accepted names.
        limit: maximum number of suggestions.
    """
    known = [*known]
    renamed = RENAMED_OPTIONS.get(name)
    return [renamed] if renamed in known else difflib.get_close_matches(name, known, limit, MIN_SIMILARITY)


def format_hint(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests a known name for an unknown one, after a space; empty if none is similar."""
    near = find_similar_names(name, known)
    return f" Did you mean {near[0]!r}?" if near else ""


@dataclass
class CheckedSettings:
    """Base of settings classes that validate their fields: on construction and on every later assignment."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {}
    """By field, a function that describes the accepted values if a value is invalid, and returns "" otherwise."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = [f.name for f in dataclasses.fields(self)]
        if name not in known:
            raise ModelError(
                f"{type(self).__name__} has no {name!r}.{format_hint(name, known)} Its fields are {', '.join(known)}."
            )
        accepted = describe_valid_values(type(self), name, value)
        if accepted:
            raise ModelError(f"{type(self).__name__}.{name} is {value!r}. Give {accepted}.")
        before = vars(self).get(name, _ABSENT)
        object.__setattr__(self, name, [*value] if isinstance(value, tuple) else value)
        contradiction = self._find_contradiction() if len(vars(self)) == len(known) else ""
        if contradiction:
            if before is not _ABSENT:
                object.__setattr__(self, name, before)
            raise ModelError(f"{type(self).__name__}: {contradiction}")

    def check(self) -> None:
        """Check all fields again, since the contents of a list may have changed since it was set.

        Raises:
            ModelError: a value has the wrong type, or contradicts another one.
        """
        for of in dataclasses.fields(self):
            setattr(self, of.name, getattr(self, of.name))

    def _find_contradiction(self) -> str:
        """Describe which fields contradict each other, once all are set; "" if none do."""
        return ""


_ABSENT = object()


def describe_valid_values(kind: type[CheckedSettings], name: str, value: Any) -> str:
    """Return a description of the values that a field of settings takes; empty if the given one is valid."""
    return kind._checks[name](value)  # noqa: SLF001 - of the class above


def check_flag(value: Any) -> str:
    """Return a description of the accepted values if a value is no bool, "" otherwise."""
    return "" if isinstance(value, bool) else "True or False"


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_optional(check: Callable[[Any], str], meaning: str) -> Callable[[Any], str]:
    """Return a check that also accepts None; ``meaning`` describes None in messages."""
    return lambda value: f"{accepted}, or None {meaning}" if value is not None and (accepted := check(value)) else ""


def check_threshold(value: Any) -> str:
    """Return a description of the accepted values if a value is no finite number >= 0, "" otherwise."""
    return "" if is_number(value) and value >= 0 and math.isfinite(value) else "a number from 0"
