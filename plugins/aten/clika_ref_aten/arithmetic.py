"""Elementwise arithmetic: sums, products, quotients and remainders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import COMPOSE, EXACT, ulp
from clika_ref.core.inference import infer_types
from clika_ref.core.operators import Operator, operator
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    FLOATS,
    HALF_DTYPES,
    NUMBERS,
    add_node_via,
    binary_lowering,
    binary_sampler,
    compute_dtype,
    draw_operand_for,
    truncate,
    unary_operator,
)
from clika_ref_aten.ordering import lower_sign as sign_of

aten = torch.ops.aten

# A sum may cancel, so its error is bounded relative to an operand only.
SUM_ERROR = ulp(8, "x")


@operator(aten.add.Tensor, aten.add.Scalar, quant=OWN_QPARAMS, error=SUM_ERROR)
def add(x: Tensor, y: Tensor | Number, *, alpha: float = 1) -> Tensor:
    """``x + alpha * y``, elementwise; logical OR for bools."""
    return torch.add(x, y, alpha=alpha)


@add.onnx
def _(op, x, y, *, alpha):
    if op.result.dtype == torch.bool:
        return op.Or(*op.promote(x, y)) if alpha else op.Identity(x)
    return op.cast(op.Add(*_promote_and_scale(op, x, y, alpha)), op.result.dtype)


@add.samples
def _(draw, s):
    x = draw(s.tensor(dtype=ALL_DTYPES))
    y = draw_operand_for(draw, s, x, dtype=ALL_DTYPES, number=True)
    return s.call(x, y, alpha=_draw_alpha(draw, s, x, y))


@operator(
    aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar, quant=OWN_QPARAMS, error=SUM_ERROR
)
def sub(x: Tensor | Number, y: Tensor | Number, *, alpha: float = 1) -> Tensor:
    """``x - alpha * y``, elementwise."""
    if isinstance(x, Tensor):
        return torch.sub(x, y, alpha=alpha)
    return torch.rsub(y, x, alpha=alpha)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers


@sub.onnx
def _(op, x, y, *, alpha):
    return op.cast(op.Sub(*_promote_and_scale(op, x, y, alpha)), op.result.dtype)


@sub.samples
def _(draw, s):
    x = draw(s.tensor(dtype=NUMBERS))
    y = draw_operand_for(draw, s, x, dtype=NUMBERS, number=True)
    alpha = _draw_alpha(draw, s, x, y)
    return s.call(y, x, alpha=alpha) if draw(s.booleans()) else s.call(x, y, alpha=alpha)


@sub.from_torch(aten.rsub.Tensor, aten.rsub.Scalar)
def _(x, other, alpha=1):
    return sub.call(other, x, alpha=alpha)


def _promote_and_scale(op, x, y, alpha):
    x, y = op.promote(x, y, to=compute_dtype(op, x, y, alpha))
    return x, y if alpha == 1 else op.Mul(y, op.like(y, alpha))


def _draw_alpha(draw, s, x, y):
    if torch.bool in (x.dtype, getattr(y, "dtype", None)):
        return 1
    floats = x.dtype.is_floating_point
    return draw(s.choice(1, 1, 0.5, -2.0) if floats else s.choice(1, 2, 3))


@operator(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar, quant=OWN_QPARAMS, error=ulp(8))
def mul(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x * y``, elementwise; logical AND for bools."""
    return torch.mul(x, y)


mul.onnx(binary_lowering("Mul", logical="And"))
mul.samples(binary_sampler(dtype=ALL_DTYPES))


@operator(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    aten.divide.Tensor,
    aten.divide.Scalar,
    aten.divide.Tensor_mode,
    aten.divide.Scalar_mode,
    aten.true_divide.Tensor,
    aten.true_divide.Scalar,
    quant=OWN_QPARAMS,
    error=ulp(8),
)
def div(x: Tensor, y: Tensor | Number, *, rounding_mode: str | None = None) -> Tensor:
    """``x / y``, elementwise; integers stay integers where ``rounding_mode`` is ``"trunc"`` or ``"floor"``."""
    return torch.div(x, y, rounding_mode=rounding_mode)


@div.onnx
def _(op, x, y, *, rounding_mode):
    dtype = op.result.dtype
    if rounding_mode is None:
        return op.cast(op.Div(*op.promote(x, y, to=compute_dtype(op, x, y))), dtype)
    to = torch.float32 if dtype in HALF_DTYPES else dtype  # no rounding of quotient or scalar before truncation
    divisor, (x, y) = y, op.promote(x, y, to=to)
    if _is_minus_one(divisor, dtype):
        return op.Mul(x, y)
    if rounding_mode == "floor":
        floor = _floor_divide_floats if dtype.is_floating_point else _floor_divide_integers
        return op.cast(floor(op, x, y, divisor), dtype)
    quotient = op.Div(x, y)
    return op.cast(truncate(op, quotient), dtype) if dtype.is_floating_point else quotient


@div.samples
def _(draw, s):
    mode = draw(s.choice(None, "floor", "trunc"))
    x = draw(s.tensor(dtype=NUMBERS, low=-9, high=9))
    return s.call(x, _draw_divisor(draw, s, x), rounding_mode=mode)


@div.from_torch(aten.floor_divide.default, aten.floor_divide.Scalar)
def _(x, other):
    return div.call(x, other, rounding_mode="floor")


def _floor_divide_integers(op, x, y, divisor):
    """Return ``floor(x / y)``: the truncated quotient, less 1 where remainder and divisor differ in sign.

    Subtracting the remainder from ``x`` first could overflow.
    """
    quotient = op.Div(x, y)
    if op.dtype(x) == torch.uint8:
        return quotient
    rest = op.Sub(x, op.Mul(quotient, y))
    return op.Sub(quotient, op.cast(_has_opposite_sign(op, rest, y, divisor), op.dtype(x)))


def _floor_divide_floats(op, x, y, divisor):
    """Return ``floor(x / y)``, computed from ``x`` less its remainder.

    ``floor`` of the quotient itself is off by one where the division rounds up to an integer.
    """
    rest = op.Mod(x, y, fmod=1)
    whole = op.Round(op.Div(op.Sub(x, rest), y))
    lower = op.Where(_has_opposite_sign(op, rest, y, divisor), op.Sub(whole, op.like(x, 1)), whole)
    if isinstance(divisor, int | float) and _wrap_to_dtype(divisor, op.dtype(y)):
        return lower
    return op.Where(op.Equal(y, op.like(y, 0)), op.Div(x, y), lower)


def _is_minus_one(divisor, dtype):
    """Return whether ``divisor`` is -1 in an integer dtype.

    ONNX Runtime crashes where the smallest integer is divided by -1.
    """
    return isinstance(divisor, int) and not dtype.is_floating_point and _wrap_to_dtype(divisor, dtype) == -1


def _wrap_to_dtype(number, dtype):
    """Return ``number`` converted to ``dtype``; integers wrap around."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None).to(dtype).item()


def _has_opposite_sign(op, rest, y, divisor):
    """Return a mask of the nonzero remainders that differ in sign from their divisor."""
    if isinstance(divisor, int | float) and _wrap_to_dtype(divisor, op.dtype(y)) > 0:
        return op.Less(rest, op.like(rest, 0))
    return op.Less(op.Mul(sign_of(op, rest), sign_of(op, y)), op.like(rest, 0))


def _draw_divisor(draw, s, x):
    low, high = draw(s.choice((0.6, 4), (-4, -1.6)))  # not -1: the smallest integer divided by it is a crash
    if x.dtype == torch.uint8:
        low, high = 0.6, 4
    dtypes = [d for d in NUMBERS if high > 0 or d != torch.uint8]
    y = draw_operand_for(draw, s, x, dtype=dtypes, number=True, low=low, high=high)
    bits = 8 * x.dtype.itemsize
    if type(y) is int and not x.dtype.is_floating_point and bits < 64 and draw(s.choice(False, False, True)):
        y += 2**bits  # wraps around to the original value
    return y or 1


@operator(
    aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor, quant=OWN_QPARAMS, error=SUM_ERROR
)
def remainder(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x - y * floor(x / y)``, elementwise: the remainder has the sign of ``y``."""
    return torch.remainder(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers


@remainder.onnx
def _(op, x, y):
    divisor, (x, y) = y, op.promote(x, 1 if _is_minus_one(y, op.result.dtype) else y)
    if not op.result.dtype.is_floating_point:
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_opposite_sign(op, rest, y, divisor), op.Add(rest, y), rest)


@remainder.samples
def _(draw, s):
    y = draw(s.tensor(dtype=NUMBERS, low=0.6, high=4))
    if draw(s.booleans()):
        return s.call(draw(s.integers(0, 9)), y)
    x = draw(s.tensor(shape=y.shape, dtype=NUMBERS, low=-9, high=9))
    return s.call(x, _draw_divisor(draw, s, x))


@operator(aten.fmod.Tensor, aten.fmod.Scalar, quant=OWN_QPARAMS, error=EXACT)
def fmod(x: Tensor, y: Tensor | Number) -> Tensor:
    """``x - y * trunc(x / y)``, elementwise: the remainder has the sign of ``x``.

    The remainder is exact. Eager returns NaN where the quotient overflows the dtype, as for 1e20 / 1e-20 in float32.
    """
    return torch.fmod(x, y)


@fmod.onnx
def _(op, x, y):
    x, y = op.promote(x, 1 if _is_minus_one(y, op.result.dtype) else y)
    if op.result.dtype.is_floating_point:
        return op.Mod(x, y, fmod=1)
    return op.Sub(x, op.Mul(op.Div(x, y), y))  # ONNX Runtime computes the fmod of integers in float64


@fmod.samples
def _(draw, s):
    x = draw(s.tensor(dtype=NUMBERS, low=-9, high=9))
    y = _draw_divisor(draw, s, x)
    if x.dtype.is_floating_point and not isinstance(y, int | float):
        x = replace(x, domain=(-(2.0**30), 2.0**30))  # eager returns NaN where the quotient overflows float32
    return s.call(x, y)


@unary_operator(torch.neg, aten.neg.default, aten.negative.default, quant=OWN_QPARAMS, error=EXACT, dtype=NUMBERS)
def neg(op, x):
    """``-x``, elementwise."""
    return add_node_via(op, "Neg", x, via={torch.uint8: torch.int32})


@unary_operator(torch.abs, aten.abs.default, aten.absolute.default, quant=OWN_QPARAMS, error=EXACT, dtype=NUMBERS)
def abs_(op, x):
    """``|x|``, elementwise."""
    return op.Abs(x)


@unary_operator(torch.sign, aten.sign.default, aten.sgn.default, quant=OWN_QPARAMS, error=EXACT, dtype=ALL_DTYPES)
def sign(op, x):
    """``-1``, ``0`` or ``1`` by the sign of ``x``, elementwise; 0 for NaN."""
    if op.dtype(x) == torch.bool:
        return op.Identity(x)
    if not op.dtype(x).is_floating_point:
        return sign_of(op, x)
    return op.Where(op.IsNaN(x), op.like(x, 0), op.Sign(x))


@unary_operator(
    torch.reciprocal, aten.reciprocal.default, quant=OWN_QPARAMS, error=ulp(8), dtype=NUMBERS, low=0.5, high=4
)
def reciprocal(op, x):
    """``1 / x``, elementwise."""
    return op.Reciprocal(x)


@operator(aten.addcmul.default, quant=OWN_QPARAMS, error=COMPOSE)
def addcmul(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """``x + value * tensor1 * tensor2``, elementwise."""
    return torch.addcmul(x, tensor1, tensor2, value=value)


def _ternary_type_rule(declared: Operator) -> Callable[..., TensorType]:
    """Return the type rule of three operands that broadcast: torch cannot broadcast three symbolic dims at once."""

    def rule(x, y, z, **attrs):
        (pair,) = infer_types(mul, (x, y), {})
        (shaped,) = infer_types(mul, (pair, z), {})
        small = [
            torch.empty((1,) * o.rank, dtype=o.dtype, device="meta") if isinstance(o, TensorType) else o
            for o in (x, y, z)
        ]
        return TensorType(declared.reference(*small, **attrs).dtype, shaped.shape)

    return rule


addcmul.types(_ternary_type_rule(addcmul))


def _lower_scaled_sum(op_type: str) -> Callable[..., Any]:
    """Return the lowering of ``x + value * tensor1 * tensor2``, with the given op type for the second product."""

    def lower(op, x, tensor1, tensor2, *, value):
        x, first, second = op.promote(x, tensor1, tensor2)
        first = first if value == 1 else op.Mul(first, op.like(first, value))
        return op.Add(x, op.node(op_type, first, second))

    return lower


addcmul.onnx(_lower_scaled_sum("Mul"))


@addcmul.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(*FLOATS, torch.int64, torch.int32)))
    first = draw_operand_for(draw, s, x, dtype=(x.dtype,), number=False)
    second = draw(s.tensor(shape=x.shape, dtype=x.dtype))
    return s.call(x, first, second, value=draw(s.choice(1, 2, 3)))


@operator(aten.addcdiv.default, quant=OWN_QPARAMS, error=COMPOSE)
def addcdiv(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """``x + value * tensor1 / tensor2``, elementwise."""
    return torch.addcdiv(x, tensor1, tensor2, value=value)


addcdiv.types(_ternary_type_rule(addcdiv))


addcdiv.onnx(_lower_scaled_sum("Div"))


@addcdiv.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS))
    first = draw_operand_for(draw, s, x, dtype=(x.dtype,), number=False)
    second = draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0.5, high=2))
    return s.call(x, first, second, value=draw(s.choice(1, 0.5, -2)))


@operator(aten.lerp.Tensor, aten.lerp.Scalar, quant=OWN_QPARAMS, error=COMPOSE)
def lerp(x: Tensor, end: Tensor, weight: Tensor | Number) -> Tensor:
    """``x + weight * (end - x)``, elementwise; exactly ``end`` where the weight is 1."""
    return torch.lerp(x, end, weight)


lerp.types(_ternary_type_rule(lerp))


@lerp.onnx
def _(op, x, end, weight):
    number, (x, end, weight) = weight, op.promote(x, end, weight, to=compute_dtype(op, weight))
    way = op.Sub(end, x)
    rest = op.Sub(op.like(weight, 1), weight)

    def from_start():
        return op.Add(x, op.Mul(weight, way))

    def from_end():
        return op.Sub(end, op.Mul(way, rest))

    if isinstance(number, int | float):
        return op.cast(from_start() if abs(number) < 0.5 else from_end(), op.result.dtype)
    return op.Where(op.Less(op.Abs(weight), op.like(weight, 0.5)), from_start(), from_end())


@lerp.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.float64)))
    end = draw(s.tensor(shape=x.shape, dtype=x.dtype))
    return s.call(x, end, draw_operand_for(draw, s, x, dtype=(x.dtype,), number=True, low=-2, high=2))
