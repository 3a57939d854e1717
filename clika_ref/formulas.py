"""How constants of a lowered graph follow from others, so that training computes them anew, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class Formula:
    """The data of a constant: result ``index`` of ``function(*sources, **arguments)``.

    A pass that folds parameters states what it makes of them like this. Read, the constant has the elements that follow
    from its sources as they are; trained, it becomes a call of the function, through which gradients reach the sources.
    """

    function: Callable[..., Any]
    """An operator, or a function whose signature is like that of one; differentiable where its sources are trained."""
    sources: tuple[Any, ...]
    """Constants, which may be such of formulas in turn; and whatever else an operand may be."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Attributes by their names."""
    index: int = 0
    """Which result it is, where there are several."""
    known: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The elements, where they have been computed; otherwise they are whenever they are read."""

    def __call__(self) -> torch.Tensor:
        """Return the elements, without a history of gradients."""
        if self.known is not None:
            return self.known
        operands = [s.data if isinstance(s, Value) else s for s in self.sources]
        with torch.no_grad():
            found = self.function(*operands, **dict(self.arguments))
        return (found if isinstance(found, torch.Tensor) else found[self.index]).detach()  # parts are views with one


def is_deferred(value: Value) -> bool:
    """Whether the elements of a constant are computed whenever they are read: they are many, and made to be written."""
    return value.formula is not None and getattr(value.formula, "known", None) is None


def given(data: torch.Tensor, name: str) -> Value:
    """Return a constant of no graph, for a formula to follow from."""
    return Value(TensorType(data.dtype, tuple(data.shape)), name, data=data)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight ``[inputs, outputs]`` with a row for each output, as that of a linear layer."""
    return weight.T
