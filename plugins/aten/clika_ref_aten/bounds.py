"""Elementwise maximum, minimum, clamp, copysign and nan_to_num."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.torch_internals.operators import OpOverload
from clika_ref_aten.elementwise import ALL_DTYPES, NUMBERS, binary_sampler, draw_operand_for, sign_bit
from clika_ref_aten.families import name_reference
from clika_ref_aten.ordering import lower_clip, lower_min_max

aten = torch.ops.aten


def _min_max_lowering(op_type: str) -> Callable[..., Any]:
    """Return the lowering of an elementwise maximum or minimum; logical OR or AND for bools."""

    def lower(op, x, y):
        if op.result.dtype == torch.bool:
            return op.node("Or" if op_type == "Max" else "And", *op.promote(x, y))
        return lower_min_max(op, op_type, *op.promote(x, y))

    return lower


def _nan_ignoring_lowering(op_type: str, wins: str) -> Callable[..., Any]:
    """Return the lowering of a maximum or minimum that returns the other element where one is NaN."""
    bounded = _min_max_lowering(op_type)

    def lower(op, x, y):
        if not op.result.dtype.is_floating_point:
            return bounded(op, x, y)
        x, y = op.promote(x, y)
        return op.Where(op.Or(op.node(wins, x, y), op.IsNaN(y)), x, y)

    return lower


def _declare_bound(name: str, doc: str, lowering: Callable[..., Any], *aliases: OpOverload) -> Operator:
    """Declare an elementwise maximum or minimum."""
    function = getattr(torch, name)

    @operator(getattr(aten, name).default, *aliases, quant=OWN_QPARAMS, error=EXACT)
    @name_reference(name, doc)
    def bound(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    bound.onnx(lowering)
    bound.samples(binary_sampler(dtype=ALL_DTYPES, number=False))
    return bound


maximum = _declare_bound(
    "maximum", "The elementwise maximum; NaN where one operand is NaN.", _min_max_lowering("Max"), aten.max.other
)
minimum = _declare_bound(
    "minimum", "The elementwise minimum; NaN where one operand is NaN.", _min_max_lowering("Min"), aten.min.other
)
fmax = _declare_bound(
    "fmax", "The elementwise maximum; the other element where one is NaN.", _nan_ignoring_lowering("Max", "Greater")
)
fmin = _declare_bound(
    "fmin", "The elementwise minimum; the other element where one is NaN.", _nan_ignoring_lowering("Min", "Less")
)


@operator(
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clip.default,
    aten.clip.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    quant=OWN_QPARAMS,
    error=EXACT,
)
def clamp(x: Tensor, min: Tensor | Number | None = None, max: Tensor | Number | None = None) -> Tensor:
    """``minimum(maximum(x, min), max)``, elementwise; None is no bound. Two bounds are both tensors or both scalars."""
    return torch.clamp(x, min, max)  # pyright: ignore[reportCallIssue, reportArgumentType] - bounds of one kind


@clamp.onnx
def _(op, x, min=None, max=None):
    numbers = all(isinstance(bound, int | float) for bound in (min, max))
    if numbers and op.result.dtype != torch.int16:
        return lower_clip(op, *op.promote(x, min, max))
    (result,) = op.promote(x)  # not Clip: runtimes replace an absent bound by the largest finite number
    if min is not None:
        result = lower_min_max(op, "Max", *op.promote(result, min))
    if max is not None:
        result = lower_min_max(op, "Min", *op.promote(result, max))
    return result


@clamp.samples
def _(draw, s):
    x = draw(s.tensor(dtype=NUMBERS, low=-9, high=9))
    both = draw(s.choice("both", "min", "max"))
    if draw(s.booleans()):
        whole = draw(s.booleans()) or not x.dtype.is_floating_point
        low, high = (0, draw(s.integers(1, 6))) if whole else (draw(s.floats(-3, 0)), draw(s.floats(-1, 3)))
    else:
        low, high = (draw_operand_for(draw, s, x, dtype=NUMBERS, number=False) for _ in range(2))
    return s.call(x, low if both != "max" else None, high if both != "min" else None)


@clamp.from_torch(aten.clamp_max.default, aten.clamp_max.Tensor)
def _(x, max):
    return clamp.call(x, None, max)


@operator(aten.copysign.Tensor, aten.copysign.Scalar, quant=OWN_QPARAMS, error=EXACT)
def copysign(x: Tensor, y: Tensor | Number) -> Tensor:
    """``|x|`` with the sign of ``y``, elementwise; -0.0 is negative."""
    return torch.copysign(x, y)


@copysign.onnx
def _(op, x, y):
    sign, (x, y) = y, op.promote(x, y)
    size = op.Abs(x)
    if isinstance(sign, int | float):
        return op.Neg(size) if math.copysign(1, sign) < 0 else size
    return op.Where(sign_bit(op, y), op.Neg(size), size)


copysign.samples(binary_sampler(dtype=NUMBERS))


@operator(aten.nan_to_num.default, quant=OWN_QPARAMS, error=EXACT)
def nan_to_num(
    x: Tensor, *, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """``x`` with NaN and infinities replaced; None means 0, and the largest and smallest finite number."""
    return torch.nan_to_num(x, nan, posinf, neginf)


@nan_to_num.onnx
def _(op, x, *, nan, posinf, neginf):
    if not op.dtype(x).is_floating_point:
        return x
    limits = torch.finfo(op.dtype(x))
    filled = op.Where(op.IsNaN(x), op.like(x, nan or 0.0), x)
    if posinf is None and neginf is None and math.isfinite(nan or 0.0):
        return op.Clip(filled, op.like(x, limits.min), op.like(x, limits.max))
    high = op.like(x, limits.max if posinf is None else posinf)
    low = op.like(x, limits.min if neginf is None else neginf)
    filled = op.Where(op.Equal(x, op.like(x, math.inf)), high, filled)
    return op.Where(op.Equal(x, op.like(x, -math.inf)), low, filled)


@nan_to_num.samples
def _(draw, s):
    x = draw(s.tensor(dtype=torch.float16, low=-2e5, high=2e5))  # beyond 65504 float16 is infinite
    if draw(s.booleans()):
        x = draw(s.tensor(dtype=(torch.float32, torch.float64, torch.int64), low=-9, high=9))
    return s.call(
        x,
        nan=draw(s.choice(None, 1.5)),
        posinf=draw(s.choice(None, 2.5)),
        neginf=draw(s.choice(None, -0.5)),
    )
