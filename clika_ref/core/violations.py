"""Violations of a target's rules in a file: the result of its optional method ``check``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clika_ref.core.targets import Target


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of one rule in a file."""

    rule: str
    node: str
    """Name of the node, or of its output if it has none; empty for the file as a whole."""
    message: str
    """The problem, and how to fix it."""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.node or 'the file'}: {self.message}"


def checker_of(target: Target) -> Callable[[Path], Sequence[Violation]] | None:
    """Return the target's function that finds violations in a file; None if it has none."""
    return getattr(target, "check", None)
