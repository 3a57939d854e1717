"""Elementwise comparisons and predicates with a bool result."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref_aten.elementwise import ALL_DTYPES, FLOATS, HALF_DTYPES, common_dtype, draw_operand_for, sign_bit
from clika_ref_aten.families import name_reference

aten = torch.ops.aten

COMPARISON_DTYPES = {torch.bool: torch.int32}
"""Dtypes that torch can order but ONNX cannot, and the dtypes to compare them in."""


def _promote_and_round(op, x, y, *, via):
    """Return the operands rounded to torch's promoted dtype.

    ONNX Runtime compares FP16 and BF16 in float32, and removes a cast before its own. A Max node between the two casts
    keeps the rounding.
    """
    dtype = common_dtype(op, x, y)
    dtype = via.get(dtype, dtype)
    rounded = [dtype in HALF_DTYPES and not isinstance(o, int | float) and op.dtype(o) != dtype for o in (x, y)]
    return [op.Max(o) if is_rounded else o for o, is_rounded in zip(op.promote(x, y, to=dtype), rounded, strict=True)]


def _declare_comparison(name: str, sign: str, op_type: str, alias: str | None, *, negated: bool = False) -> Operator:
    """Declare a comparison by one ONNX node, in torch's promoted dtype; ``alias`` is a second name of the ATen call."""
    compare, packets = getattr(torch, name), [getattr(aten, n) for n in (name, alias) if n]
    via = {} if op_type == "Equal" else COMPARISON_DTYPES

    @operator(*(overload for packet in packets for overload in (packet.Tensor, packet.Scalar)), error=EXACT)
    @name_reference(name, f"``x {sign} y``, elementwise.")
    def comparison(x: Tensor, y: Tensor | Number) -> Tensor:
        return compare(x, y)

    @comparison.onnx
    def _(op, x, y):
        result = op.node(op_type, *_promote_and_round(op, x, y, via=via))
        return op.Not(result) if negated else result

    @comparison.samples
    def _(draw, s):
        x = draw(s.tensor(dtype=ALL_DTYPES, low=0, high=2))
        if draw(s.choice(False, False, True)):
            return s.call(x, draw(s.choice(0.5, 1.5)))  # between integers
        return s.call(x, draw_operand_for(draw, s, x, dtype=ALL_DTYPES, number=True, low=0, high=2))

    return comparison


eq = _declare_comparison("eq", "==", "Equal", None)
ne = _declare_comparison("ne", "!=", "Equal", "not_equal", negated=True)
lt = _declare_comparison("lt", "<", "Less", "less")
le = _declare_comparison("le", "<=", "LessOrEqual", "less_equal")
gt = _declare_comparison("gt", ">", "Greater", "greater")
ge = _declare_comparison("ge", ">=", "GreaterOrEqual", "greater_equal")


def _declare_predicate(name: str, doc: str, lower_float, *, of_others: bool = False) -> Operator:
    """Declare a predicate of floats; ``of_others`` is its result for dtypes without NaN and infinities."""
    function = getattr(torch, name)

    @operator(getattr(aten, name).default, error=EXACT)
    @name_reference(name, doc)
    def predicate(x: Tensor) -> Tensor:
        return function(x)

    @predicate.onnx
    def _(op, x):
        if op.dtype(x).is_floating_point:
            return lower_float(op, x)
        return op.Equal(x, x) if of_others else _false_like(op, x)

    predicate.samples(_draw_special)
    return predicate


def _draw_special(draw, s):
    """Draw a tensor that is likely to hold special values: float16 overflows beyond 65504."""
    if draw(s.choice("plain", "wide")) == "plain":
        return s.call(draw(s.tensor(dtype=ALL_DTYPES)))
    return s.call(draw(s.tensor(dtype=torch.float16, low=-1e5, high=1e5)))


isnan = _declare_predicate("isnan", "Whether an element is NaN.", lambda op, x: op.IsNaN(x))
isinf = _declare_predicate(  # not by IsInf, which does not support float16 before opset 20
    "isinf",
    "Whether an element is infinite, of either sign.",
    lambda op, x: op.Equal(op.Abs(x), op.like(x, math.inf)),
)
isfinite = _declare_predicate(
    "isfinite",
    "Whether an element is neither infinite nor NaN.",
    lambda op, x: op.Less(op.Abs(x), op.like(x, math.inf)),
    of_others=True,
)
isposinf = _declare_predicate(
    "isposinf", "Whether an element is positive infinity.", lambda op, x: op.Equal(x, op.like(x, math.inf))
)
isneginf = _declare_predicate(
    "isneginf", "Whether an element is negative infinity.", lambda op, x: op.Equal(x, op.like(x, -math.inf))
)


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


signbit.samples(_draw_special)


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
    finite = op.Less(distance, op.like(x, math.inf))
    return op.Or(equal, op.And(finite, op.LessOrEqual(distance, allowed)))


@isclose.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(*FLOATS, torch.int64)))
    y = draw(s.tensor(shape=x.shape, dtype=x.dtype))
    return s.call(
        x, y, rtol=draw(s.choice(1e-5, 0.5, 0.0)), atol=draw(s.choice(1e-8, 1.0, 0.0)), equal_nan=draw(s.booleans())
    )
