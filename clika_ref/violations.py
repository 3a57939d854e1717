"""Rules of a target that a file breaks: what its optional method ``check`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clika_ref.core.targets import Target


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a file breaks a rule."""

    rule: str
    node: str
    """The name of the node, or of what it makes where it has none; nothing where the file as a whole is meant."""
    message: str
    """What is wrong there, and what to do."""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.node or 'the file'}: {self.message}"


def checker_of(target: Target) -> Callable[[Path], Sequence[Violation]] | None:
    """Return what finds the rules of a target that a file breaks; None where it has none."""
    return getattr(target, "check", None)
