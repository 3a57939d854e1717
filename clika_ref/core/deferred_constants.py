"""Deferred constants: functions of other constants that training recomputes, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class DeferredConstant:
    """The data of a constant: result ``index`` of ``function(*sources, **arguments)``.

    A pass that folds parameters describes its result like this. Each read computes the elements from the current
    sources. In training, the constant becomes a call of the function, so that gradients reach the sources.
    """

    function: Callable[..., Any]
    """An operator, or a function with such a signature; differentiable if its sources are trained."""
    sources: tuple[Any, ...]
    """Constants, possibly deferred ones, and other operands."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Attributes by name."""
    index: int = 0
    """Index of the result, if there are several."""
    known: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The elements, if they are computed already; otherwise each read computes them."""

    def __call__(self) -> torch.Tensor:
        """Return the elements, detached."""
        if self.known is not None:
            return self.known
        operands = [s.data if isinstance(s, Value) else s for s in self.sources]
        with torch.no_grad():
            found = self.function(*operands, **dict(self.arguments))
        return (found if isinstance(found, torch.Tensor) else found[self.index]).detach()  # views have a history


def is_deferred(value: Value) -> bool:
    """Return whether each read computes the elements of a constant: large ones are made only to be exported."""
    return value.deferred_data is not None and getattr(value.deferred_data, "known", None) is None


def make_source_constant(data: torch.Tensor, name: str) -> Value:
    """Return a constant outside any graph, as a source of a `DeferredConstant`.

    Args:
        data: the elements, of any shape; the type of the constant has the same dtype and shape.
        name: the name of the constant.
    """
    return Value(TensorType.of(data), name, data=data)


def transpose_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight ``[inputs, outputs]`` with a row for each output, as in a linear layer."""
    return weight.T
