"""Rounding to integers, elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import FLOATS, NUMBERS, truncate, unary_sampler

aten = torch.ops.aten


def _float_only_lowering(round_float: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering that rounds floats and leaves integers unchanged."""

    def lower(op, x):
        return round_float(op, x) if op.dtype(x).is_floating_point else x

    return lower


@operator(aten.floor.default, error=EXACT)
def floor(x: Tensor) -> Tensor:
    """The largest integer that is at most ``x``, elementwise."""
    return torch.floor(x)


floor.onnx(_float_only_lowering(lambda op, x: op.Floor(x)))
floor.samples(unary_sampler(dtype=NUMBERS))


@operator(aten.ceil.default, error=EXACT)
def ceil(x: Tensor) -> Tensor:
    """The smallest integer that is at least ``x``, elementwise."""
    return torch.ceil(x)


ceil.onnx(_float_only_lowering(lambda op, x: op.Ceil(x)))
ceil.samples(unary_sampler(dtype=NUMBERS))


@operator(aten.trunc.default, aten.fix.default, error=EXACT)
def trunc(x: Tensor) -> Tensor:
    """``x`` rounded towards 0, elementwise."""
    return torch.trunc(x)


trunc.onnx(_float_only_lowering(truncate))
trunc.samples(unary_sampler(dtype=NUMBERS))


@operator(aten.frac.default, error=EXACT)
def frac(x: Tensor) -> Tensor:
    """``x - trunc(x)``, elementwise: the fraction, with the sign of ``x``."""
    return torch.frac(x)


@frac.onnx
def _(op, x):
    return op.Mod(x, op.like(x, 1), fmod=1)


frac.samples(unary_sampler(dtype=FLOATS))


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
