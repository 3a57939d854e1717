"""Trigonometric and hyperbolic functions, elementwise; angles are in radians."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from clika_ref.core.accuracy import ulp
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    DTYPES_VIA_FLOAT32,
    NUMBERS,
    VIA_FLOAT32,
    add_node_via,
    binary_sampler,
    sign_bit,
    unary_operator,
)

aten = torch.ops.aten


@unary_operator(torch.sin, aten.sin.default, error=ulp(8, 1.0), dtype=ALL_DTYPES, low=-9, high=9)
def sin(op, x):
    """The sine, elementwise."""
    return op.Sin(x)


@unary_operator(torch.cos, aten.cos.default, error=ulp(8, 1.0), dtype=ALL_DTYPES, low=-9, high=9)
def cos(op, x):
    """The cosine, elementwise."""
    return op.Cos(x)


QUARTER_TURN_TERMS = tuple(
    map(float.fromhex, ("0x1.921fb4p+0", "0x1.4442dp-24", "0x1.846988p-48", "0x1.8cc51701b839ap-72"))
)
"""``pi / 2`` as a sum: the first three terms have 24 bits, so that integer multiples of them are exact."""

MAX_QUARTER_TURNS = 2**29
"""Limit of multiples of ``pi / 2``: 29 bits and 24 bits fit into the 53 of a float64."""


def _lower_float64_tan(op, x):
    """Return the tangent as sine by cosine, which ONNX Runtime has in float64, after a range reduction.

    ONNX Runtime's cosine is imprecise near its zeros, where the tangent is large. So multiples of ``pi / 2`` are
    subtracted first, exactly. After an odd number of them the tangent is ``-cos / sin``.
    """
    size = op.Abs(x)
    is_near = op.Less(size, op.like(x, MAX_QUARTER_TURNS))  # beyond, ONNX Runtime's own reduction is exact
    is_turned = op.And(is_near, op.Greater(size, op.like(x, math.pi / 4)))
    quarters = op.Where(is_turned, op.Round(op.Mul(x, op.like(x, 2 / math.pi))), op.like(x, 0))
    rest = x
    for part in QUARTER_TURN_TERMS:
        rest = op.Sub(rest, op.Mul(quarters, op.like(x, part)))
    sine, cosine, halves = op.Sin(rest), op.Cos(rest), op.Mul(quarters, op.like(x, 0.5))
    is_even = op.Equal(op.Floor(halves), halves)
    return op.Div(op.Where(is_even, sine, op.Neg(cosine)), op.Where(is_even, cosine, sine))


@unary_operator(torch.tan, aten.tan.default, error=ulp(8, 1.0), dtype=ALL_DTYPES, low=-1.2, high=1.2)
def tan(op, x):
    """The tangent, elementwise."""
    return _lower_float64_tan(op, x) if op.dtype(x) == torch.float64 else op.Tan(x)


@unary_operator(
    torch.asin, aten.asin.default, aten.arcsin.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32, low=-1, high=1
)
def asin(op, x):
    """The inverse sine in ``[-pi/2, pi/2]``, elementwise."""
    return add_node_via(op, "Asin", x, via=VIA_FLOAT32)


@unary_operator(
    torch.acos, aten.acos.default, aten.arccos.default, error=ulp(8, 1.0), dtype=DTYPES_VIA_FLOAT32, low=-1, high=1
)
def acos(op, x):
    """The inverse cosine in ``[0, pi]``, elementwise."""
    return add_node_via(op, "Acos", x, via=VIA_FLOAT32)


@unary_operator(torch.atan, aten.atan.default, aten.arctan.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32)
def atan(op, x):
    """The inverse tangent in ``[-pi/2, pi/2]``, elementwise."""
    return add_node_via(op, "Atan", x, via=VIA_FLOAT32)


def _compute_in_float64(function, x):
    """Apply a function in float64: its float32 kernel for 32 or more elements overflows as early as ``e**x``.

    In PyTorch 2.13 on CPUs with AVX-512, ``torch.full((32,), 89.0).cosh()`` is infinite.
    """
    dtype = torch.result_type(x, 1.0)
    return function(x.double()).to(dtype) if dtype in (torch.float32, torch.bfloat16) else function(x)


@unary_operator(partial(_compute_in_float64, torch.sinh), aten.sinh.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32)
def sinh(op, x):
    """``(e**x - e**-x) / 2``, elementwise."""
    return add_node_via(op, "Sinh", x, via=VIA_FLOAT32)


@unary_operator(partial(_compute_in_float64, torch.cosh), aten.cosh.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32)
def cosh(op, x):
    """``(e**x + e**-x) / 2``, elementwise."""
    return add_node_via(op, "Cosh", x, via=VIA_FLOAT32)


@unary_operator(torch.asinh, aten.asinh.default, aten.arcsinh.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32)
def asinh(op, x):
    """The inverse hyperbolic sine, elementwise."""
    return add_node_via(op, "Asinh", x, via=VIA_FLOAT32)


@unary_operator(
    torch.acosh, aten.acosh.default, aten.arccosh.default, error=ulp(8, 1.0), dtype=DTYPES_VIA_FLOAT32, low=1, high=9
)
def acosh(op, x):
    """The nonnegative inverse hyperbolic cosine, elementwise; NaN below 1."""
    return add_node_via(op, "Acosh", x, via=VIA_FLOAT32)


@unary_operator(
    torch.atanh, aten.atanh.default, aten.arctanh.default, error=ulp(8), dtype=DTYPES_VIA_FLOAT32, low=-0.9, high=0.9
)
def atanh(op, x):
    """The inverse hyperbolic tangent, elementwise; NaN outside ``[-1, 1]``."""
    return add_node_via(op, "Atanh", x, via=VIA_FLOAT32)


@operator(aten.atan2.default, aten.arctan2.default, error=ulp(8))
def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle in ``[-pi, pi]`` of the point ``(x, y)``, elementwise."""
    return torch.atan2(y, x)


@atan2.onnx
def _(op, y, x):
    y, x = op.promote(y, x)
    height, width = op.Abs(y), op.Abs(x)
    # 0 / 0 is an angle of 0, inf / inf is one of pi / 4: the sign is the tangent of both.
    slope = op.Where(op.Equal(height, width), op.Sign(height), op.Div(height, width))
    angle = add_node_via(op, "Atan", slope, via=VIA_FLOAT32)
    angle = op.Where(sign_bit(op, x), op.Sub(op.like(x, math.pi), angle), angle)
    return op.Where(sign_bit(op, y), op.Neg(angle), angle)


atan2.samples(binary_sampler(dtype=(torch.float32, torch.float16), number=False))


@unary_operator(torch.deg2rad, aten.deg2rad.default, error=ulp(8), dtype=NUMBERS, low=-99, high=99)
def deg2rad(op, x):
    """``x * pi / 180``, elementwise."""
    return op.Mul(x, op.like(x, math.pi / 180))


@unary_operator(torch.rad2deg, aten.rad2deg.default, error=ulp(8), dtype=NUMBERS)
def rad2deg(op, x):
    """``x * 180 / pi``, elementwise."""
    return op.Mul(x, op.like(x, 180 / math.pi))
