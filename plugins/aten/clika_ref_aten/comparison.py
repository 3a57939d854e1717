"""Elementwise comparisons and predicates with a bool result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import ALL_DTYPES, FLOATS, HALF_DTYPES, common_dtype, draw_operand_for, sign_bit

aten = torch.ops.aten

COMPARISON_DTYPES = {torch.bool: torch.int32}
"""Dtypes that torch can order but ONNX cannot, and the dtypes to compare them in."""


def _compare(op_type: str, *, via: dict[torch.dtype, torch.dtype] = COMPARISON_DTYPES) -> Callable[..., Any]:
    """Return the lowering to one comparison in torch's promoted dtype."""

    def lower(op, x, y):
        return op.node(op_type, *_promote_and_round(op, x, y, via=via))

    return lower


def _promote_and_round(op, x, y, *, via):
    """Return the operands rounded to torch's promoted dtype.

    ONNX Runtime compares half precision in float32, and removes a cast before its own. A Max node between the two casts
    keeps the rounding.
    """
    dtype = common_dtype(op, x, y)
    dtype = via.get(dtype, dtype)
    rounded = [dtype in HALF_DTYPES and not isinstance(o, int | float) and op.dtype(o) != dtype for o in (x, y)]
    return [op.Max(o) if is_rounded else o for o, is_rounded in zip(op.promote(x, y, to=dtype), rounded, strict=True)]


def _sample(draw, s):
    x = draw(s.tensor(dtype=ALL_DTYPES, low=0, high=2))
    if draw(s.choice(False, False, True)):
        return s.call(x, draw(s.choice(0.5, 1.5)))  # between integers
    return s.call(x, draw_operand_for(draw, s, x, dtype=ALL_DTYPES, number=True, low=0, high=2))


@operator(aten.eq.Tensor, aten.eq.Scalar, error=EXACT)
def eq(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x == y``, elementwise."""
    return torch.eq(x, y)


eq.onnx(_compare("Equal", via={}))
eq.samples(_sample)


@operator(aten.ne.Tensor, aten.ne.Scalar, aten.not_equal.Tensor, aten.not_equal.Scalar, error=EXACT)
def ne(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x != y``, elementwise."""
    return torch.ne(x, y)


@ne.onnx
def _(op, x, y):
    return op.Not(op.Equal(*_promote_and_round(op, x, y, via={})))


ne.samples(_sample)


@operator(aten.lt.Tensor, aten.lt.Scalar, aten.less.Tensor, aten.less.Scalar, error=EXACT)
def lt(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x < y``, elementwise."""
    return torch.lt(x, y)


lt.onnx(_compare("Less"))
lt.samples(_sample)


@operator(aten.le.Tensor, aten.le.Scalar, aten.less_equal.Tensor, aten.less_equal.Scalar, error=EXACT)
def le(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x <= y``, elementwise."""
    return torch.le(x, y)


le.onnx(_compare("LessOrEqual"))
le.samples(_sample)


@operator(aten.gt.Tensor, aten.gt.Scalar, aten.greater.Tensor, aten.greater.Scalar, error=EXACT)
def gt(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x > y``, elementwise."""
    return torch.gt(x, y)


gt.onnx(_compare("Greater"))
gt.samples(_sample)


@operator(aten.ge.Tensor, aten.ge.Scalar, aten.greater_equal.Tensor, aten.greater_equal.Scalar, error=EXACT)
def ge(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x >= y``, elementwise."""
    return torch.ge(x, y)


ge.onnx(_compare("GreaterOrEqual"))
ge.samples(_sample)


@operator(aten.isnan.default, error=EXACT)
def isnan(x: Tensor) -> Tensor:
    """Whether an element is NaN."""
    return torch.isnan(x)


@isnan.onnx
def _(op, x):
    return op.IsNaN(x) if op.dtype(x).is_floating_point else _false_like(op, x)


@operator(aten.isinf.default, error=EXACT)
def isinf(x: Tensor) -> Tensor:
    """Whether an element is infinite, of either sign."""
    return torch.isinf(x)


@isinf.onnx
def _(op, x):
    if not op.dtype(x).is_floating_point:
        return _false_like(op, x)
    return op.Equal(op.Abs(x), op.like(x, float("inf")))  # IsInf does not support float16 before opset 20


@operator(aten.isfinite.default, error=EXACT)
def isfinite(x: Tensor) -> Tensor:
    """Whether an element is neither infinite nor NaN."""
    return torch.isfinite(x)


@isfinite.onnx
def _(op, x):
    if not op.dtype(x).is_floating_point:
        return op.Equal(x, x)
    return op.Less(op.Abs(x), op.like(x, float("inf")))


@operator(aten.isposinf.default, error=EXACT)
def isposinf(x: Tensor) -> Tensor:
    """Whether an element is positive infinity."""
    return torch.isposinf(x)


isposinf.onnx(lambda op, x: _is_infinity(op, x, float("inf")))


@operator(aten.isneginf.default, error=EXACT)
def isneginf(x: Tensor) -> Tensor:
    """Whether an element is negative infinity."""
    return torch.isneginf(x)


isneginf.onnx(lambda op, x: _is_infinity(op, x, float("-inf")))


def _is_infinity(op, x, infinity):
    return op.Equal(x, op.like(x, infinity)) if op.dtype(x).is_floating_point else _false_like(op, x)


def _false_like(op, x):
    """Return False in the shape of ``x``, for dtypes without NaN, infinities or a sign."""
    return op.Not(op.Equal(x, x))


@operator(aten.signbit.default, error=EXACT)
def signbit(x: Tensor) -> Tensor:
    """Whether an element is negative, -0.0 included."""
    return torch.signbit(x)


@signbit.onnx
def _(op, x):
    dtype = op.dtype(x)
    if dtype == torch.bool:
        return _false_like(op, x)
    return sign_bit(op, x) if dtype.is_floating_point else op.Less(x, op.like(x, 0))


def _sample_special(draw, s):
    """Draw a tensor that is likely to hold special values: float16 overflows beyond 65504."""
    kind = draw(s.choice("plain", "wide"))
    if kind == "plain":
        return s.call(draw(s.tensor(dtype=ALL_DTYPES)))
    return s.call(draw(s.tensor(dtype=torch.float16, low=-1e5, high=1e5)))


isnan.samples(_sample_special)
isinf.samples(_sample_special)
isfinite.samples(_sample_special)
isposinf.samples(_sample_special)
isneginf.samples(_sample_special)
signbit.samples(_sample_special)


@operator(aten.isclose.default, error=EXACT)
def isclose(x: Tensor, y: Tensor, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """``x == y or |x - y| <= atol + rtol * |y|``, elementwise; infinite differences are never close."""
    return torch.isclose(x, y, rtol, atol, equal_nan)


@isclose.onnx
def _(op, x, y, *, rtol, atol, equal_nan):
    equal = op.Equal(x, y)
    floating = op.dtype(x).is_floating_point
    if equal_nan and floating:
        equal = op.Or(equal, op.And(op.IsNaN(x), op.IsNaN(y)))
    if rtol == 0 and atol == 0:
        return equal
    x, y = op.promote(x, y, to=op.dtype(x) if floating else torch.float32)
    distance = op.Abs(op.Sub(x, y))
    allowed = op.Add(op.Abs(op.Mul(y, op.like(y, rtol))), op.like(y, atol))
    finite = op.Less(distance, op.like(x, float("inf")))
    return op.Or(equal, op.And(finite, op.LessOrEqual(distance, allowed)))


@isclose.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(*FLOATS, torch.int64)))
    y = draw(s.tensor(shape=x.shape, dtype=x.dtype))
    return s.call(
        x, y, rtol=draw(s.choice(1e-5, 0.5, 0.0)), atol=draw(s.choice(1e-8, 1.0, 0.0)), equal_nan=draw(s.booleans())
    )
