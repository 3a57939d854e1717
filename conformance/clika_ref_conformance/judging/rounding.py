"""Rounding units of a dtype, and the form of a call of an operator or ATen overload that the bounds use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.arithmetic import FloatFormat
from clika_ref_conformance.eager_calls import as_list

AnyFormat = torch.dtype | FloatFormat


@dataclass(frozen=True, slots=True)
class ConcreteCall:
    """Function and its arguments, with floating tensors in float64."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    attrs: Mapping[str, Any]

    @property
    def floats(self) -> list[torch.Tensor]:
        """Operands that are floating tensors, in order."""
        return [t for t in flatten_operands(self.operands) if is_float(t)]

    @property
    def first(self) -> torch.Tensor:
        """First tensor operand, in float64; the largest absolute number if there is none."""
        tensors = [t for t in flatten_operands(self.operands) if isinstance(t, torch.Tensor)]
        numbers = [abs(float(o)) for o in self.operands if isinstance(o, int | float)]
        return tensors[0].double() if tensors else torch.tensor(max(numbers, default=0.0), dtype=torch.float64)

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Compute the call, with ``change`` applied to every floating tensor among the operands."""
        operands = self.operands if change is None else map_floats(self.operands, change)
        return as_list(self.function(*operands, **self.attrs))

    def attribute(self, name: str, position: int, default: Any = None) -> Any:
        """Return an attribute; an ATen overload takes it by ``position``."""
        if name in self.attrs:
            return self.attrs[name]
        return self.operands[position] if position < len(self.operands) else default


def is_float(item: Any) -> bool:
    """Return whether an operand is a floating tensor."""
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def flatten_operands(items: Any) -> list[Any]:
    """Return operands with nested lists of operands flattened."""
    return [i for item in items for i in (flatten_operands(item) if isinstance(item, list | tuple) else [item])]


def map_floats(items: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return operands with ``change`` applied to their floating tensors."""
    if isinstance(items, list | tuple):
        return type(items)([map_floats(item, change) for item in items])
    return change(items) if is_float(items) else items


def limits_of(dtype: AnyFormat) -> torch.finfo | FloatFormat:
    """Return ``eps``, ``smallest_normal`` and ``max`` of a floating format."""
    return dtype if isinstance(dtype, FloatFormat) else torch.finfo(dtype)


def smallest_step_of(dtype: AnyFormat) -> float:
    """Return the distance from 0 to the next number: the absolute error that any result may have."""
    limits = limits_of(dtype)
    return limits.step if isinstance(limits, FloatFormat) else limits.smallest_normal * limits.eps


def rounding_unit_of(dtype: AnyFormat) -> float:
    """Return the largest relative error of one rounding: 2^-24 for float32."""
    return limits_of(dtype).eps / 2


EXPONENT_MASK = 0x7FF0 << 48
"""Mask of the exponent bits of a float64: alone, they are the largest power of 2 not above its absolute value."""


def ulp_of(values: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    """Return the distance between neighbors of ``dtype`` at each of the ``values``, in float64; NaN counts as zero."""
    info = limits_of(dtype)
    magnitude = values.double().abs().nan_to_num(0.0, info.max).clamp(info.smallest_normal, info.max)
    power = (magnitude.view(torch.int64) & EXPONENT_MASK).view(torch.float64)
    distance = power * info.eps
    return distance if isinstance(info, torch.finfo) else distance.clamp(min=info.step)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 values to another floating dtype, and return them in float64."""
    return values if dtype is torch.float64 else values.to(dtype).double()
