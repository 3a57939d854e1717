"""Floats that forward reads from tensors: they compute and promote as Python's do, in tensors without sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from clika_ref.capture.aliasing import Traced
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class Number:
    """A Python float that forward reads from a tensor: the element of ``value``, which has no sides and no history."""

    value: Value


def number_in(tensor: Value, build: Builder) -> Number:
    """Return the float that a tensor of one element holds; no gradient flows back through it."""
    flat = tensor if tensor.type.rank == 0 else build("reshape", tensor, shape=())
    return Number(build("detach", flat, types=(flat.type,)))


def among_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], build: Builder) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with each float as a tensor that promotes beside the others as the float does."""
    given = (*args, *kwargs.values())
    if not any(isinstance(arg, Number) for arg in given):
        return args, kwargs
    dtype = _dtype_beside([arg.value.type for arg in given if isinstance(arg, Traced)])

    def cast(arg: Any) -> Any:
        return _as(dtype, arg.value, build) if isinstance(arg, Number) else arg

    return tuple(map(cast, args)), {name: cast(arg) for name, arg in kwargs.items()}


def _dtype_beside(types: list[TensorType]) -> torch.dtype:
    """Return what a float computes in beside tensors: their dtype, or the default one where they hold integers.

    Those with sides decide over others; next to half precision PyTorch computes with floats in float32.
    """
    floats = [t for t in types if t.dtype.is_floating_point or t.dtype.is_complex]
    wide = [t.dtype for t in floats if t.rank]
    dtypes = [*wide, torch.float32] if wide else [t.dtype for t in floats] or [torch.get_default_dtype()]
    return reduce(torch.promote_types, dtypes)


def _as(dtype: torch.dtype, value: Value, build: Builder) -> Value:
    if value.type.dtype == dtype:
        return value
    return build("to", value, dtype=dtype, types=(TensorType(dtype, value.type.shape),))
