"""The type of a value before it is computed, and its origin in the model."""

# pyright: reportMissingTypeStubs=false
# Sympy has no type annotations.

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import sympy
    import torch

Dim: TypeAlias = "int | sympy.Expr"
"""The size of a dim: a number, or an expression over the named symbols of a graph."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and shape of a tensor; sizes are numbers or expressions over symbols."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """Return the type of a tensor of any shape."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether every size is a plain number."""
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def element_count(self) -> int:
        """The number of elements of a static type."""
        return math.prod(map(int, self.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a node: module paths, the user's source lines, and the rules that rewrote it.

    ``scopes`` lists modules from the outermost to the innermost (``("encoder", "encoder.layers.0")``), without the
    root. ``lines`` holds ``file:line`` entries, the innermost call last, and ``history`` the rules in order.
    """

    scopes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    history: tuple[str, ...] = field(default=())

    @property
    def scope(self) -> str:
        """The path of the innermost module, ``""`` for the root."""
        return self.scopes[-1] if self.scopes else ""

    @property
    def line(self) -> str:
        """The innermost source line of the user's code, ``""`` if unknown."""
        return self.lines[-1] if self.lines else ""

    def with_rule(self, rule: str) -> Origin:
        """Return this origin with ``rule`` appended to its history."""
        return replace(self, history=(*self.history, rule))

    def __str__(self) -> str:
        location = self.scope or "<root>"
        return f"{location} at {self.line}" if self.line else location
