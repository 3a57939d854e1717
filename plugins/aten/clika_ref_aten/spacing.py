"""Linearly and logarithmically spaced numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import ulp
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import FloorDiv
from clika_ref_aten.creation import truncate_to_int

aten = torch.ops.aten


@operator(aten.linspace.default, error=ulp(8, "x"))
def linspace(
    *, start: Number, end: Number, steps: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """``steps`` equally spaced numbers from ``start`` to ``end``, both included."""
    return torch.linspace(start, end, steps, dtype=dtype, device=device)


@linspace.types
def _(*, start, end, steps, dtype, device):
    return TensorType(dtype or torch.get_default_dtype(), (steps,))


@linspace.onnx
def _(op, *, start, end, steps, dtype, device):
    if is_symbolic((start, end, steps)):
        return _lower_linspace(op, start, end, steps, op.result.dtype)
    return op.constant(torch.linspace(start, end, steps, dtype=dtype), op.result.dtype)


def _lower_linspace(op, start, end, steps, dtype):
    """Lower `linspace` from start and end, as eager does, so that both are exact."""
    within = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    if whole := not dtype.is_floating_point:
        start, end = truncate_to_int(start), truncate_to_int(end)
    first, last, one, gaps = op.promote(start, end, 1, steps - 1, to=within)
    gap = op.Div(op.Sub(last, first), op.Max(gaps, one))
    position = op.cast(op.Range(*op.promote(0, steps, 1, to=torch.int64)), within)
    (half,) = op.promote(FloorDiv(steps, 2), to=within)
    along = _add_steps_fused if whole else _add_steps
    from_first = along(op, first, gap, position)
    from_last = along(op, last, op.Neg(gap), op.Sub(gaps, position))
    return op.cast(op.Where(op.Less(position, op.Max(half, one)), from_first, from_last), dtype)


def _add_steps(op, start, gap, position):
    """Return ``start + gap * position``."""
    return op.Add(start, op.Mul(gap, position))


def _add_steps_fused(op, start, gap, position):
    """Return `_add_steps` with one rounding, like eager's fused multiply-add; the result is truncated afterwards.

    ``gap`` is split into two parts. The product of either part is exact up to half a billion positions.
    """
    coarse = op.cast(op.cast(gap, torch.float32), torch.float64)
    return _add_steps(op, _add_steps(op, start, coarse, position), op.Sub(gap, coarse), position)


@linspace.samples
def _(draw, s):
    bounds = {"start": draw(s.choice(0, -1.5, 3)), "end": draw(s.choice(1, 2.5, -7))}
    dtype = draw(s.choice(None, torch.float64, torch.int64))
    return s.call(**bounds, steps=draw(s.integers(0, 7)), dtype=dtype, device=None)


@operator(aten.logspace.default, error=ulp(8, "x"))
def logspace(
    *,
    start: Number,
    end: Number,
    steps: int,
    base: float = 10.0,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """``base ** linspace(start, end, steps)``."""
    return torch.logspace(start, end, steps, base, dtype=dtype, device=device)


@logspace.types
def _(*, start, end, steps, base, dtype, device):
    return TensorType(dtype or torch.get_default_dtype(), (steps,))


@logspace.onnx
def _(op, *, start, end, steps, base, dtype, device):
    if not is_symbolic((start, end, steps)):
        return op.constant(torch.logspace(start, end, steps, base, dtype=dtype), op.result.dtype)
    exponent = _lower_linspace(op, start, end, steps, torch.float64)
    return op.cast(op.Pow(op.like(exponent, base), exponent), op.result.dtype)


@logspace.samples
def _(draw, s):
    bounds = {"start": draw(s.choice(0, -1.5)), "end": draw(s.choice(1, 2.5))}
    kind = {"dtype": draw(s.choice(None, torch.float64)), "device": None}
    return s.call(**bounds, steps=draw(s.integers(0, 7)), base=draw(s.choice(10.0, 2.0)), **kind)
