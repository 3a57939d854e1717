"""Rounding to integers, elementwise."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import FLOATS, NUMBERS, truncate, unary_operator

aten = torch.ops.aten


@unary_operator(torch.floor, aten.floor.default, error=EXACT, dtype=NUMBERS)
def floor(op, x):
    """The largest integer that is at most ``x``, elementwise."""
    return op.Floor(x) if op.dtype(x).is_floating_point else x


@unary_operator(torch.ceil, aten.ceil.default, error=EXACT, dtype=NUMBERS)
def ceil(op, x):
    """The smallest integer that is at least ``x``, elementwise."""
    return op.Ceil(x) if op.dtype(x).is_floating_point else x


@unary_operator(torch.trunc, aten.trunc.default, aten.fix.default, error=EXACT, dtype=NUMBERS)
def trunc(op, x):
    """``x`` rounded towards 0, elementwise."""
    return truncate(op, x) if op.dtype(x).is_floating_point else x


@unary_operator(torch.frac, aten.frac.default, error=EXACT, dtype=FLOATS)
def frac(op, x):
    """``x - trunc(x)``, elementwise: the fraction, with the sign of ``x``."""
    return op.Mod(x, op.like(x, 1), fmod=1)


@operator(aten.round.default, aten.round.decimals, aten.special_round.default, error=ulp(8))
def round_(x: Tensor, *, decimals: int = 0) -> Tensor:
    """``x`` rounded to a number of decimals, elementwise; ties round to even."""
    return torch.round(x, decimals=decimals)


@round_.onnx
def _(op, x, *, decimals):
    if not op.dtype(x).is_floating_point:
        return x
    if decimals == 0:
        return op.Round(x)
    scale = op.like(x, 10.0 ** abs(decimals))
    if decimals > 0:
        return op.Div(op.Round(op.Mul(x, scale)), scale)
    return op.Mul(op.Round(op.Div(x, scale)), scale)


@round_.samples
def _(draw, s):
    decimals = draw(s.choice(0, 1, 2, -1))
    x = draw(s.tensor(dtype=(torch.float32, torch.float64) if decimals else FLOATS, low=-30, high=30))
    return s.call(x, decimals=decimals)
