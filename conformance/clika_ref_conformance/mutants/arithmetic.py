"""Faults of arithmetic, casts, bounds and elementwise functions."""

from __future__ import annotations

import math

import torch

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("arithmetic")


def _is_float(op):
    return op.result.dtype.is_floating_point


@FAULTS.lowering("div", "rounding_mode='floor' rounds towards zero")
def _(original, op, x, y, *, rounding_mode):
    return original(op, x, y, rounding_mode="trunc" if rounding_mode == "floor" else rounding_mode)


@FAULTS.lowering("div", "the true quotient of integers is truncated")
def _(original, op, x, y, *, rounding_mode):
    given = [op.dtype(v) for v in (x, y) if not isinstance(v, int | float)]
    if rounding_mode is None and torch.int64 in given and not any(d.is_floating_point for d in given):
        return op.cast(op.Div(*op.promote(x, y, to=torch.int64)), op.result.dtype)
    return original(op, x, y, rounding_mode=rounding_mode)


@FAULTS.lowering("div", "a division by a number multiplies by its reciprocal in FP16")
def _(original, op, x, y, *, rounding_mode):
    if isinstance(y, int | float) and y and _is_float(op) and rounding_mode is None:
        return op.Mul(*op.promote(x, float(torch.tensor(1 / y).half())))
    return original(op, x, y, rounding_mode=rounding_mode)


@FAULTS.lowering("remainder", "the result has the sign of the dividend")
def _(original, op, x, y):
    return op.Mod(*op.promote(x, y), fmod=1)


@FAULTS.lowering("fmod", "the result has the sign of the divisor if both are integers")
def _(original, op, x, y):
    return original(op, x, y) if _is_float(op) else op.Mod(*op.promote(x, y))


@FAULTS.lowering("sub", "alpha scales the first operand")
def _(original, op, x, y, *, alpha):
    x, y = op.promote(x, y)
    return op.Sub(x if alpha == 1 else op.Mul(x, op.like(x, alpha)), y)


@FAULTS.lowering("add", "alpha is ignored if an operand is a number")
def _(original, op, x, y, *, alpha):
    return original(op, x, y, alpha=1 if isinstance(y, int | float) else alpha)


@FAULTS.lowering("cumsum", "int64 is summed in 32 bits")
def _(original, op, x, **attrs):
    if op.result.dtype != torch.int64:
        return original(op, x, **attrs)

    def write(op, summed, *rest):
        return op.cast(op.CumSum(op.cast(summed, torch.int32), *rest), torch.int64)

    return original(PatchedOp(op, CumSum=write), x, **attrs)


@FAULTS.lowering("sum", "int64 is summed in 32 bits")
def _(original, op, x, **attrs):
    if op.result.dtype != torch.int64:
        return original(op, x, **attrs)

    def write(op, summed, *rest, **how):
        return op.cast(op.ReduceSum(op.cast(summed, torch.int32), *rest, **how), torch.int64)

    return original(PatchedOp(op, ReduceSum=write), x, **attrs)


@FAULTS.lowering("mul", "int64 is multiplied in 32 bits")
def _(original, op, x, y):
    if op.result.dtype != torch.int64:
        return original(op, x, y)
    return op.cast(op.Mul(*op.promote(x, y, to=torch.int32)), torch.int64)


@FAULTS.lowering("to", "a cast between int32 and int64 casts to int32")
def _(original, op, x, *, dtype):
    wide = (torch.int64, torch.float64, torch.float32)
    return original(op, op.cast(x, torch.int32) if op.dtype(x) == torch.int64 and dtype in wide else x, dtype=dtype)


@FAULTS.lowering("to", "NaN becomes False")
def _(original, op, x, *, dtype):
    if dtype == torch.bool and op.dtype(x).is_floating_point:
        return op.Greater(op.Abs(x), op.like(x, 0))
    return original(op, x, dtype=dtype)


@FAULTS.lowering("clamp", "if min is above max, the result is min")
def _(original, op, x, low=None, high=None):
    (result,) = op.promote(x)
    result = result if high is None else op.Min(result, *op.promote(high))
    return result if low is None else op.Max(result, *op.promote(low))


@FAULTS.lowering("clamp", "NaN becomes the lower bound")
def _(original, op, x, low=None, high=None):
    (kept,) = op.promote(x)
    if low is not None and _is_float(op):
        (low,) = op.promote(low)
        kept = op.Where(op.Greater(kept, low), kept, low)
    return original(op, kept, low, high)


@FAULTS.lowering("clamp", "a missing bound is the largest finite number")
def _(original, op, x, low=None, high=None):
    if _is_float(op) and (low is None or high is None):
        ends = torch.finfo(op.result.dtype)
        return original(op, x, ends.min if low is None else low, ends.max if high is None else high)
    return original(op, x, low, high)


@FAULTS.lowering("maximum", "NaN of the first operand is ignored")
def _(original, op, x, y):
    if not _is_float(op):
        return original(op, x, y)
    x, y = op.promote(x, y)
    return op.Where(op.Greater(x, y), x, y)


@FAULTS.lowering("fmax", "NaN is propagated")
def _(original, op, x, y):
    return op.Max(*op.promote(x, y)) if _is_float(op) else original(op, x, y)


@FAULTS.lowering("sign", "the sign of NaN is NaN")
def _(original, op, x):
    return op.Sign(x) if op.dtype(x).is_floating_point else original(op, x)


FAULTS.node_functions(
    "round",
    "ties are rounded away from zero",
    Round=lambda op, x: op.Mul(op.Sign(x), op.Floor(op.Add(op.Abs(x), op.like(x, 0.5)))),
)


FAULTS.attribute_values("gelu", "approximate is ignored", approximate="none")


FAULTS.attribute_values("softplus", "beta is ignored", beta=1.0)


@FAULTS.lowering("softplus", "large elements overflow, as without a threshold")
def _(original, op, x, *, beta, threshold):
    scaled = op.Mul(x, op.like(x, beta))
    return op.Div(op.Log(op.Add(op.Exp(scaled), op.like(x, 1))), op.like(x, beta))


FAULTS.attribute_values("elu", "input_scale is ignored", input_scale=1.0)


FAULTS.node_attributes("hardsigmoid", "the slope is 0.2, as in ONNX and Keras", "HardSigmoid", alpha=0.2)


FAULTS.node_functions(
    "threshold", "an element equal to the threshold is kept", LessOrEqual=lambda op, a, b: op.Less(a, b)
)


FAULTS.node_functions("hardshrink", "an element equal to the bound is kept", LessOrEqual=lambda op, a, b: op.Less(a, b))


@FAULTS.lowering("log1p", "log(1 + x) cancels for a small x")
def _(original, op, x):
    (x,) = op.promote(x)
    return op.Log(op.Add(x, op.like(x, 1)))


@FAULTS.lowering("expm1", "exp(x) - 1 cancels for a small x")
def _(original, op, x):
    (x,) = op.promote(x)
    return op.Sub(op.Exp(x), op.like(x, 1))


@FAULTS.lowering("logaddexp", "exponentials overflow")
def _(original, op, x, y):
    x, y = op.promote(x, y)
    return op.Log(op.Add(op.Exp(x), op.Exp(y)))


@FAULTS.lowering("atan2", "the quadrant is ignored")
def _(original, op, y, x):
    return op.Atan(op.Div(*op.promote(y, x)))


FAULTS.attribute_values("nan_to_num", "posinf is ignored", posinf=None)


FAULTS.attribute_values("isclose", "equal_nan is ignored", equal_nan=False)


@FAULTS.lowering("eq", "equality is a difference of zero, so infinities differ from themselves")
def _(original, op, x, y):
    operands = [v for v in (x, y) if not isinstance(v, int | float)]
    if not all(op.dtype(v) == torch.float32 for v in operands):
        return original(op, x, y)
    difference = op.declare(op.Sub(*op.promote(x, y, to=torch.float32)), torch.float32)
    return op.Equal(difference, op.scalar(0, torch.float32))


@FAULTS.lowering("pow", "a negative base gives NaN, as exp(y log x) does")
def _(original, op, x, y):
    if not _is_float(op):
        return original(op, x, y)
    x, y = op.promote(x, y)
    return op.Exp(op.Mul(y, op.Log(x)))


@FAULTS.lowering("bitwise_right_shift", "zeros come from the left of a negative number")
def _(original, op, x, y):
    if op.result.dtype != torch.int64:
        return original(op, x, y)
    x, y = (op.cast(v, torch.uint64) for v in op.promote(x, y))
    return op.cast(op.BitShift(x, y, direction="RIGHT"), torch.int64)


@FAULTS.lowering("lerp", "a weight of 1 gives the end with a rounding error")
def _(original, op, x, end, weight):
    x, end, weight = op.promote(x, end, weight)
    return op.Add(x, op.Mul(op.cast(op.cast(weight, torch.float16), op.dtype(x)), op.Sub(end, x)))


@FAULTS.lowering("sin", "angles are reduced by a rounded 2 pi")
def _(original, op, x):
    (x,) = op.promote(x)
    turn = op.like(x, 2 * math.pi)
    return op.Sin(op.Sub(x, op.Mul(op.Round(op.Div(x, turn)), turn)))


@FAULTS.lowering("mean", "an infinite mean becomes the largest finite number")
def _(original, op, x, **attrs):
    mean = original(op, x, **attrs)
    largest = torch.finfo(op.result.dtype).max
    return op.Min(op.Max(mean, op.like(mean, -largest)), op.like(mean, largest)) if _is_float(op) else mean


FAULTS.node_functions("ne", "a number that should be rounded to FP16 is not rounded", Max=lambda op, rounded: rounded)


@FAULTS.lowering("tan", "the float64 tangent is a sine divided by a cosine that is inaccurate near its zeros")
def _(original, op, x):
    return op.Div(op.Sin(x), op.Cos(x)) if op.dtype(x) == torch.float64 else original(op, x)


@FAULTS.lowering("div", "an FP16 quotient is rounded before its fraction is truncated")
def _(original, op, x, y, *, rounding_mode):
    if rounding_mode != "trunc" or op.result.dtype not in (torch.float16, torch.bfloat16):
        return original(op, x, y, rounding_mode=rounding_mode)
    quotient = op.Div(*op.promote(x, y))
    return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))


def _round_int64_through(dtype):
    """Return a lowering fault that casts int64 operands to a float dtype and back, which rounds them."""

    def round_operand(op, value):
        wide = not isinstance(value, bool | int | float) and op.dtype(value) == torch.int64
        if not wide:
            return value
        return op.declare(op.cast(op.cast(value, dtype), torch.int64), TensorType(torch.int64, op.shape(value)))

    def lower(original, op, *operands, **attrs):
        return original(op, *(round_operand(op, v) for v in operands), **attrs)

    return lower


for _subject, _dtype in {
    "eq": torch.float64,
    "lt": torch.float32,
    "minimum": torch.float64,
    "remainder": torch.float64,
    "argmax": torch.float32,
    "topk": torch.float64,
}.items():
    FAULTS.lowering(_subject, f"int64 passes through {str(_dtype).removeprefix('torch.')}")(
        _round_int64_through(_dtype)
    )


@FAULTS.lowering("where", "a square condition is transposed")
def _(original, op, condition, x, y):
    sizes = op.shape(condition)
    if len(sizes) < 2 or sizes[-1] != sizes[-2]:
        return original(op, condition, x, y)
    order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
    transposed = op.declare(op.Transpose(condition, perm=order), TensorType(op.dtype(condition), sizes))
    return original(op, transposed, x, y)


@FAULTS.lowering("poisson_nll_loss", "NaN is treated as 0")
def _(original, op, x, target, **attrs):
    without = op.declare(op.Where(op.IsNaN(x), op.like(x, 0.0), x), TensorType(op.dtype(x), op.shape(x)))
    return original(op, without, target, **attrs)


@FAULTS.lowering("clamp", "int64 bounds use the comparison of the runtime, which is wrong beyond 31 bits")
def _(original, op, x, min=None, max=None):
    if op.result.dtype != torch.int64 or min is None or max is None:
        return original(op, x, min, max)
    return op.Clip(*op.promote(x, min, max))


@FAULTS.lowering("minimum", "int64 uses the comparison of the runtime, which is wrong beyond 31 bits")
def _(original, op, x, y):
    return op.Min(*op.promote(x, y)) if op.result.dtype == torch.int64 else original(op, x, y)


@FAULTS.lowering("div", "a number that FP16 cannot represent becomes infinite, or 0")
def _(original, op, x, y, *, rounding_mode):
    if rounding_mode is not None or op.result.dtype != torch.float16:
        return original(op, x, y, rounding_mode=rounding_mode)
    return op.Div(*op.promote(x, y))


@FAULTS.lowering("pow", "an integer exponent is rounded to the dtype of the base, and becomes even")
def _(original, op, x, y):
    large = isinstance(y, int) and y > 2**24 and op.result.dtype == torch.float32
    return op.Pow(*op.promote(x, y)) if large else original(op, x, y)


@FAULTS.lowering("eq", "a number that is combined with int64 is rounded to float32")
def _(original, op, x, y):
    number = isinstance(y, int) and not isinstance(y, bool) and op.dtype(x) == torch.int64
    return original(op, x, int(torch.tensor(y, dtype=torch.float32).double())) if number else original(op, x, y)


@FAULTS.lowering("sub", "a number is truncated if the tensor has an integer dtype")
def _(original, op, x, y, *, alpha):
    whole = isinstance(y, float) and math.isfinite(y) and not op.dtype(x).is_floating_point
    return original(op, x, int(y) if whole else y, alpha=alpha)


@FAULTS.lowering("where", "an infinite number becomes the largest finite one")
def _(original, op, condition, x, y):
    def clamp_to_finite(n):
        return math.copysign(torch.finfo(torch.float32).max, n) if isinstance(n, float) and math.isinf(n) else n

    return original(op, condition, clamp_to_finite(x), clamp_to_finite(y))


@FAULTS.lowering("full", "the number passes through float32")
def _(original, op, *, fill_value, **attrs):
    whole = isinstance(fill_value, int) and not isinstance(fill_value, bool)
    rounded = int(torch.tensor(fill_value, dtype=torch.float32).double()) if whole else fill_value
    return original(op, fill_value=rounded, **attrs)


@FAULTS.lowering("to", "a float is cast to an integer by rounding down, which is wrong if it is negative")
def _(original, op, x, *, dtype):
    down = op.dtype(x).is_floating_point and not dtype.is_floating_point and dtype != torch.bool
    return original(op, op.declare(op.Floor(x), op.dtype(x)) if down else x, dtype=dtype)
