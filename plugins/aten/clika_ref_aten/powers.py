"""Powers and roots, elementwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import ulp
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    FLOATS,
    NUMBERS,
    add_node_via,
    binary_sampler,
    draw_operand_for,
    unary_operator,
)

aten = torch.ops.aten


@operator(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, error=ulp(8))
def pow_(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x ** y``, elementwise."""
    if torch.result_type(x, y) is torch.bool:  # meta tensors give integers here
        return torch.pow(x, y).bool()  # pyright: ignore[reportCallIssue, reportArgumentType]
    return torch.pow(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers


def _power(op, x, y):
    dtype = op.result.dtype
    exponent, (x, y) = y, op.promote(x, y)
    match exponent:
        case 1:
            return x
        case 0.5:
            return op.Sqrt(x)
        case -0.5:
            return op.Reciprocal(op.Sqrt(x))
        case -1:
            return op.Reciprocal(x)
        case int() if not dtype.is_floating_point and exponent > 1:
            return _power_by_squaring(op, x, exponent)
    if isinstance(exponent, int | float) and _is_rounded(exponent, dtype):
        return op.Pow(x, op.scalar(exponent, torch.float64))  # a large base would amplify the rounding error
    narrow = dict.fromkeys((torch.int16, torch.int8, torch.uint8), torch.int64)
    return add_node_via(op, "Pow", x, y, via=narrow)


def _is_rounded(exponent: float, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.tensor(exponent, dtype=dtype).item() != exponent


def _power_by_squaring(op, x, exponent: int):
    """Compute an integer power by repeated squaring: ONNX Runtime's Pow rounds integers to float64."""
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else op.Mul(result, x)
        exponent >>= 1
        x = op.Mul(x, x) if exponent else x
    return result


pow_.onnx(_power)


@pow_.samples
def _(draw, s):
    form = draw(s.choice("integer", "root", "number first", "tensors"))
    if form == "integer":
        return s.call(draw(s.tensor(dtype=ALL_DTYPES)), draw(s.choice(2, 0, 1, 3, 4, 5)))
    x = draw(s.tensor(dtype=FLOATS, low=0.3, high=3))
    if form == "root":
        return s.call(x, draw(s.choice(0.5, -0.5, -1, -2.0, 1.7)))
    if form == "number first":
        return s.call(draw(s.choice(2, 10000.0, 0.5)), draw(s.tensor(dtype=NUMBERS, low=0, high=3)))
    low = 0.6
    x = draw(s.tensor(dtype=NUMBERS, low=low, high=3))
    return s.call(x, draw_operand_for(draw, s, x, dtype=NUMBERS, number=False, low=low, high=3))


@operator(aten.float_power.Tensor_Tensor, aten.float_power.Tensor_Scalar, aten.float_power.Scalar, error=ulp(8))
def float_power(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x ** y``, elementwise, computed in float64."""
    return torch.float_power(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers


float_power.onnx(_power)


@float_power.samples
def _(draw, s):
    if draw(s.booleans()):
        return s.call(draw(s.floats(0.5, 3)), draw(s.tensor(dtype=NUMBERS)))
    return binary_sampler(dtype=NUMBERS, low=0.6, high=3)(draw, s)


@unary_operator(torch.square, aten.square.default, quant=OWN_QPARAMS, error=ulp(8), dtype=ALL_DTYPES)
def square(op, x):
    """``x * x``, elementwise."""
    return op.Mul(x, x)


@unary_operator(torch.sqrt, aten.sqrt.default, error=ulp(8), dtype=ALL_DTYPES, low=0, high=9)
def sqrt(op, x):
    """The square root, elementwise; NaN for negative numbers."""
    return op.Sqrt(x)


@unary_operator(torch.rsqrt, aten.rsqrt.default, error=ulp(8), dtype=NUMBERS, low=0.6, high=9)
def rsqrt(op, x):
    """``1 / sqrt(x)``, elementwise."""
    return op.Reciprocal(op.Sqrt(x))


@operator(aten.hypot.default, error=ulp(8))
def hypot(x: Tensor, y: Tensor) -> Tensor:
    """``sqrt(x**2 + y**2)``, elementwise, without intermediate overflow."""
    return torch.hypot(x, y)


@hypot.onnx
def _(op, x, y):
    x, y = (op.Abs(v) for v in op.promote(x, y))
    longer = op.Max(x, y)
    ratio = op.Div(op.Min(x, y), longer)
    length = op.Mul(longer, op.Sqrt(op.Add(op.Mul(ratio, ratio), op.like(x, 1))))
    # 0 / 0 and inf / inf: the result is the longer leg; an infinite leg wins even where the other is NaN.
    length = op.Where(op.IsNaN(ratio), longer, length)
    infinity = op.like(x, math.inf)
    return op.Where(op.Or(op.Equal(x, infinity), op.Equal(y, infinity)), infinity, length)


hypot.samples(binary_sampler(dtype=FLOATS, number=False))
