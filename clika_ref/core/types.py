"""What is known of a value before it is computed: its type, and where it comes from."""

# pyright: reportMissingTypeStubs=false
# Sympy states no types.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import sympy
    import torch

Dim: TypeAlias = "int | sympy.Expr"
"""The length of a side: a number, or an expression over the named symbols of a graph."""


def is_static(dim: object) -> bool:
    """Whether a side, or an element of an attribute, is a plain number."""
    return isinstance(dim, int)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and shape of a tensor; sides are numbers or expressions over symbols."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """The number of sides."""
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether every side is a plain number."""
        return all(isinstance(dim, int) for dim in self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: module paths, the user's own source lines, and the rules it went through.

    ``scopes`` runs from the outermost module to the innermost (``("encoder", "encoder.layers.0")``); the root module is
    left out. ``lines`` holds ``file:line`` entries, the innermost call last, and ``history`` the rules in their order.
    """

    scopes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    history: tuple[str, ...] = field(default=())

    @property
    def scope(self) -> str:
        """Path of the innermost module, ``""`` for the root."""
        return self.scopes[-1] if self.scopes else ""

    @property
    def line(self) -> str:
        """The innermost source line of the user's own code, ``""`` if unknown."""
        return self.lines[-1] if self.lines else ""

    def through(self, rule: str) -> Origin:
        """Return this origin with one more rule in its history."""
        return replace(self, history=(*self.history, rule))

    def __str__(self) -> str:
        place = self.scope or "<root>"
        return f"{place} at {self.line}" if self.line else place
