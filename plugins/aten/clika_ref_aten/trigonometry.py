"""Trigonometric and hyperbolic functions, elementwise; angles are in radians."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import ulp
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    DTYPES_VIA_FLOAT32,
    NUMBERS,
    VIA_FLOAT32,
    binary_sampler,
    sign_bit,
    unary_lowering,
    unary_sampler,
)

aten = torch.ops.aten


@operator(aten.sin.default, error=ulp(8, 1.0))
def sin(x: Tensor) -> Tensor:
    """The sine, elementwise."""
    return torch.sin(x)


sin.onnx(unary_lowering("Sin"))
sin.samples(unary_sampler(dtype=ALL_DTYPES, low=-9, high=9))


@operator(aten.cos.default, error=ulp(8, 1.0))
def cos(x: Tensor) -> Tensor:
    """The cosine, elementwise."""
    return torch.cos(x)


cos.onnx(unary_lowering("Cos"))
cos.samples(unary_sampler(dtype=ALL_DTYPES, low=-9, high=9))


QUARTER_TURN_TERMS = tuple(
    map(float.fromhex, ("0x1.921fb4p+0", "0x1.4442dp-24", "0x1.846988p-48", "0x1.8cc51701b839ap-72"))
)
"""``pi / 2`` as a sum: the first three terms have 24 bits, so that their products with integers are exact."""

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


@operator(aten.tan.default, error=ulp(8, 1.0))
def tan(x: Tensor) -> Tensor:
    """The tangent, elementwise."""
    return torch.tan(x)


@tan.onnx
def _(op, x):
    (x,) = op.promote(x)
    return _lower_float64_tan(op, x) if op.dtype(x) == torch.float64 else op.Tan(x)


tan.samples(unary_sampler(dtype=ALL_DTYPES, low=-1.2, high=1.2))


@operator(aten.asin.default, aten.arcsin.default, error=ulp(8))
def asin(x: Tensor) -> Tensor:
    """The inverse sine in ``[-pi/2, pi/2]``, elementwise."""
    return torch.asin(x)


asin.onnx(unary_lowering("Asin", via=VIA_FLOAT32))
asin.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32, low=-1, high=1))


@operator(aten.acos.default, aten.arccos.default, error=ulp(8, 1.0))
def acos(x: Tensor) -> Tensor:
    """The inverse cosine in ``[0, pi]``, elementwise."""
    return torch.acos(x)


acos.onnx(unary_lowering("Acos", via=VIA_FLOAT32))
acos.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32, low=-1, high=1))


@operator(aten.atan.default, aten.arctan.default, error=ulp(8))
def atan(x: Tensor) -> Tensor:
    """The inverse tangent in ``[-pi/2, pi/2]``, elementwise."""
    return torch.atan(x)


atan.onnx(unary_lowering("Atan", via=VIA_FLOAT32))
atan.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32))


def _compute_in_float64(function, x):
    """Apply a function in float64: its float32 kernel for 32 or more elements overflows as early as ``e**x``.

    In PyTorch 2.13 on CPUs with AVX-512, ``torch.full((32,), 89.0).cosh()`` is infinite.
    """
    dtype = torch.result_type(x, 1.0)
    return function(x.double()).to(dtype) if dtype in (torch.float32, torch.bfloat16) else function(x)


@operator(aten.sinh.default, error=ulp(8))
def sinh(x: Tensor) -> Tensor:
    """``(e**x - e**-x) / 2``, elementwise."""
    return _compute_in_float64(torch.sinh, x)


sinh.onnx(unary_lowering("Sinh", via=VIA_FLOAT32))
sinh.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32))


@operator(aten.cosh.default, error=ulp(8))
def cosh(x: Tensor) -> Tensor:
    """``(e**x + e**-x) / 2``, elementwise."""
    return _compute_in_float64(torch.cosh, x)


cosh.onnx(unary_lowering("Cosh", via=VIA_FLOAT32))
cosh.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32))


@operator(aten.asinh.default, aten.arcsinh.default, error=ulp(8))
def asinh(x: Tensor) -> Tensor:
    """The inverse hyperbolic sine, elementwise."""
    return torch.asinh(x)


asinh.onnx(unary_lowering("Asinh", via=VIA_FLOAT32))
asinh.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32))


@operator(aten.acosh.default, aten.arccosh.default, error=ulp(8, 1.0))
def acosh(x: Tensor) -> Tensor:
    """The nonnegative inverse hyperbolic cosine, elementwise; NaN below 1."""
    return torch.acosh(x)


acosh.onnx(unary_lowering("Acosh", via=VIA_FLOAT32))
acosh.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32, low=1, high=9))


@operator(aten.atanh.default, aten.arctanh.default, error=ulp(8))
def atanh(x: Tensor) -> Tensor:
    """The inverse hyperbolic tangent, elementwise; NaN outside ``[-1, 1]``."""
    return torch.atanh(x)


atanh.onnx(unary_lowering("Atanh", via=VIA_FLOAT32))
atanh.samples(unary_sampler(dtype=DTYPES_VIA_FLOAT32, low=-0.9, high=0.9))


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
    angle = unary_lowering("Atan", via=VIA_FLOAT32)(op, slope)
    angle = op.Where(sign_bit(op, x), op.Sub(op.like(x, math.pi), angle), angle)
    return op.Where(sign_bit(op, y), op.Neg(angle), angle)


atan2.samples(binary_sampler(dtype=(torch.float32, torch.float16), number=False))


@operator(aten.deg2rad.default, error=ulp(8))
def deg2rad(x: Tensor) -> Tensor:
    """``x * pi / 180``, elementwise."""
    return torch.deg2rad(x)


@deg2rad.onnx
def _(op, x):
    (x,) = op.promote(x)
    return op.Mul(x, op.like(x, math.pi / 180))


deg2rad.samples(unary_sampler(dtype=NUMBERS, low=-99, high=99))


@operator(aten.rad2deg.default, error=ulp(8))
def rad2deg(x: Tensor) -> Tensor:
    """``x * 180 / pi``, elementwise."""
    return torch.rad2deg(x)


@rad2deg.onnx
def _(op, x):
    (x,) = op.promote(x)
    return op.Mul(x, op.like(x, 180 / math.pi))


rad2deg.samples(unary_sampler(dtype=NUMBERS))
