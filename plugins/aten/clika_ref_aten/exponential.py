"""Elementwise exponentials, logarithms and functions built from them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import ulp
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    FLOATS,
    NUMBERS,
    binary_sampler,
    draw_operand_for,
    unary_operator,
    unary_sampler,
)
from clika_ref_aten.error_function import complementary_error_function, error_function

aten = torch.ops.aten

# Near 1 a logarithm is small but its operand is not, so the error is also relative to 1.0.
LOGARITHM_ERROR = ulp(8, 1.0)


@unary_operator(torch.exp, aten.exp.default, error=ulp(8), dtype=ALL_DTYPES)
def exp(op, x):
    """``e ** x``, elementwise."""
    return op.Exp(x)


@unary_operator(torch.exp2, aten.exp2.default, aten.special_exp2.default, error=ulp(8), dtype=ALL_DTYPES)
def exp2(op, x):
    """``2 ** x``, elementwise."""
    return op.Pow(op.like(x, 2), x)  # exp(x * ln 2) would amplify the rounding error of x * ln 2 by x


@operator(aten.expm1.default, aten.special_expm1.default, error=ulp(8))
def expm1(x: Tensor) -> Tensor:
    """``e ** x - 1``, elementwise, precise near 0."""
    return torch.expm1(x)


@expm1.onnx
def _(op, x):
    (x,) = op.promote(x)
    half = op.Tanh(op.Mul(x, op.like(x, 0.5)))  # tanh(x / 2) = (e^x - 1) / (e^x + 1): no cancellation
    return op.Mul(half, op.Add(op.Exp(x), op.like(x, 1)))


@expm1.samples
def _(draw, s):
    reach = draw(s.choice(3, 1e-4))
    return s.call(draw(s.tensor(dtype=ALL_DTYPES if reach > 1 else torch.float32, low=-reach, high=reach)))


@unary_operator(torch.log, aten.log.default, error=LOGARITHM_ERROR, dtype=ALL_DTYPES, low=0.1, high=9)
def log(op, x):
    """The natural logarithm, elementwise; NaN for negative numbers."""
    return op.Log(x)


@unary_operator(torch.log2, aten.log2.default, error=LOGARITHM_ERROR, dtype=ALL_DTYPES, low=0.1, high=9)
def log2(op, x):
    """The logarithm to base 2, elementwise."""
    return _logarithm(op, x, 2)


@unary_operator(torch.log10, aten.log10.default, error=LOGARITHM_ERROR, dtype=ALL_DTYPES, low=0.1, high=9)
def log10(op, x):
    """The logarithm to base 10, elementwise."""
    return _logarithm(op, x, 10)


def _logarithm(op, x, base: float):
    """Return the logarithm to ``base``, exact for integer powers of the base: a floor may follow."""
    quotient = op.Div(op.Log(x), op.like(x, math.log(base)))
    whole = op.Round(quotient)
    return op.Where(op.Equal(op.Pow(op.like(x, base), whole), x), whole, quotient)


@operator(aten.log1p.default, aten.special_log1p.default, error=ulp(8))
def log1p(x: Tensor) -> Tensor:
    """``log(1 + x)``, elementwise, precise near 0."""
    return torch.log1p(x)


@log1p.onnx
def _(op, x):
    return lower_log1p(op, *op.promote(x))


def lower_log1p(op, x):
    """Return ``log(1 + x)`` of a float tensor, precise for small ``x``."""
    raised = op.Add(x, op.like(x, 1))
    kept = op.Sub(raised, op.like(x, 1))
    logarithm = op.Log(raised)
    # Add the rounding error of 1 + x back, to first order. Where there is none, 1 + x may be infinite or 0.
    mended = op.Add(logarithm, op.Div(op.Sub(x, kept), raised))
    return op.Where(op.Equal(kept, x), logarithm, mended)


@log1p.samples
def _(draw, s):
    reach = draw(s.choice(9, 1e-4))
    return s.call(draw(s.tensor(dtype=ALL_DTYPES if reach > 1 else torch.float32, low=-min(reach, 0.6), high=reach)))


@operator(aten.logaddexp.default, error=LOGARITHM_ERROR)
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """``log(e**x + e**y)``, elementwise, without intermediate overflow."""
    return torch.logaddexp(x, y)


@operator(aten.logaddexp2.default, error=LOGARITHM_ERROR)
def logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    """``log2(2**x + 2**y)``, elementwise, without intermediate overflow."""
    return torch.logaddexp2(x, y)


def _lower_logaddexp(op, x, y, *, of_base: float):
    """Return ``max(x, y) + log(1 + base ** -|x - y|)``; Softplus computes the second term."""
    x, y = op.promote(x, y)
    distance = op.Where(op.Equal(x, y), op.like(x, 0), op.Abs(op.Sub(x, y)))  # inf - inf is NaN, not 0
    more = op.Softplus(op.Mul(distance, op.like(x, -of_base)))
    return op.Add(op.Max(x, y), more if of_base == 1 else op.Div(more, op.like(x, of_base)))


logaddexp.onnx(partial(_lower_logaddexp, of_base=1.0))
logaddexp.samples(binary_sampler(dtype=FLOATS, number=False, low=-9, high=9))
logaddexp2.onnx(partial(_lower_logaddexp, of_base=math.log(2)))
logaddexp2.samples(binary_sampler(dtype=(torch.float32, torch.float64), number=False, low=-9, high=9))


@operator(aten.logit.default, aten.special_logit.default, error=LOGARITHM_ERROR)
def logit(x: Tensor, *, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))``, elementwise; ``x`` is first clamped to ``[eps, 1 - eps]`` if ``eps`` is given."""
    return torch.logit(x, eps)


@logit.onnx
def _(op, x, *, eps):
    (x,) = op.promote(x)
    if eps is not None and eps >= 0:
        low, high = op.like(x, eps), op.like(x, 1 - eps)
        below, above = op.Less(x, low), op.Greater(x, high)  # in this order: for eps > 0.5, low is above high
        x = op.Where(below, low, op.Where(above, high, x))
    return op.Log(op.Div(x, op.Sub(op.like(x, 1), x)))


logit.samples(
    unary_sampler(dtype=(torch.float32, torch.float64), low=0.1, high=0.9, attrs={"eps": (None, 0.3, 0.0, 0.6)})
)


@operator(
    aten.xlogy.Tensor,
    aten.xlogy.Scalar_Self,
    aten.xlogy.Scalar_Other,
    aten.special_xlogy.default,
    aten.special_xlogy.self_scalar,
    aten.special_xlogy.other_scalar,
    error=ulp(8, "x"),
)
def xlogy(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x * log(y)``, elementwise; 0 where ``x`` is 0, unless ``y`` is NaN."""
    return torch.xlogy(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers


@xlogy.onnx
def _(op, x, y):
    x, y = op.promote(x, y)
    zero = op.And(op.Equal(x, op.like(x, 0)), op.Not(op.IsNaN(y)))
    return op.Where(zero, op.like(x, 0), op.Mul(x, op.Log(y)))


@xlogy.samples
def _(draw, s):
    y = draw(s.tensor(dtype=NUMBERS, low=0.6, high=4))
    x = draw_operand_for(draw, s, y, dtype=NUMBERS, number=True, low=-2, high=2)
    return s.call(x, y) if draw(s.booleans()) or not hasattr(x, "dtype") else s.call(x, draw(s.floats(0.5, 4)))


@unary_operator(torch.erf, aten.erf.default, aten.special_erf.default, error=ulp(8), dtype=ALL_DTYPES)
def erf(op, x):
    """The error function, elementwise."""
    return error_function(op, x)


@unary_operator(
    torch.erfc, aten.erfc.default, aten.special_erfc.default, error=ulp(16), dtype=ALL_DTYPES, low=-4, high=9
)
def erfc(op, x):
    """``1 - erf(x)``, elementwise, precise where it is small."""
    return complementary_error_function(op, x)


@unary_operator(torch.sinc, aten.sinc.default, aten.special_sinc.default, error=ulp(8, 1.0), dtype=ALL_DTYPES)
def sinc(op, x):
    """``sin(pi * x) / (pi * x)``, elementwise; 1 at 0."""
    angle = op.Mul(x, op.like(x, math.pi))
    return op.Where(op.Equal(x, op.like(x, 0)), op.like(x, 1), op.Div(op.Sin(angle), angle))
