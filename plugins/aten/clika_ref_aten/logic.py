"""Logical and bitwise operators, and selection by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref_aten.elementwise import (
    ALL_DTYPES,
    INTS,
    NUMBERS,
    binary_lowering,
    binary_sampler,
    choose,
    common_dtype,
    draw_operand_for,
    unary_sampler,
)
from clika_ref_aten.families import name_reference
from clika_ref_aten.ordering import lower_min_max

aten = torch.ops.aten

BIT_DTYPES = (torch.bool, *INTS)


def _logical_lowering(op_type: str) -> Callable[..., Any]:
    """Return the lowering to one logical node on the operands, promoted to one dtype and then cast to bool."""

    def lower(op, *operands):
        if len(operands) > 1:  # a 0-d tensor of lower priority may lose digits and become 0
            operands = op.promote(*operands, to=common_dtype(op, *operands))
        return op.node(op_type, *op.promote(*operands, to=torch.bool))

    return lower


def _declare_logical(name: str, doc: str, op_type: str) -> Operator:
    """Declare a logical operator of two tensors."""
    function = getattr(torch, name)

    @operator(getattr(aten, name).default, error=EXACT)
    @name_reference(name, doc)
    def logical(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    logical.onnx(_logical_lowering(op_type))
    logical.samples(binary_sampler(dtype=ALL_DTYPES, number=False, low=0, high=1))
    return logical


logical_and = _declare_logical("logical_and", "Whether both elements differ from 0.", "And")
logical_or = _declare_logical("logical_or", "Whether at least one of two elements differs from 0.", "Or")
logical_xor = _declare_logical("logical_xor", "Whether exactly one of two elements differs from 0.", "Xor")


@operator(aten.logical_not.default, error=EXACT)
def logical_not(x: Tensor) -> Tensor:
    """Whether an element is 0."""
    return torch.logical_not(x)


logical_not.onnx(_logical_lowering("Not"))
logical_not.samples(unary_sampler(dtype=ALL_DTYPES, low=0, high=1))


def _declare_bitwise(
    name: str, dunder: str, doc: str, lowering: Callable[..., Any], sampler: Callable[..., Any]
) -> Operator:
    """Declare a bitwise operator of two tensors, or of a tensor and a number; ``dunder`` is its Python method."""
    function, overloads, method = getattr(torch, name), getattr(aten, name), getattr(aten, dunder)
    scalar = overloads.Tensor_Scalar if "shift" in name else overloads.Scalar

    @operator(overloads.Tensor, scalar, overloads.Scalar_Tensor, method.Tensor, method.Scalar, error=EXACT)
    @name_reference(name, doc)
    def bitwise(x: Tensor | Number, y: Tensor | Number) -> Tensor:
        return function(x, y)

    bitwise.onnx(lowering)
    bitwise.samples(sampler)
    return bitwise


def _draw_bits(draw, s):
    x = draw(s.tensor(dtype=BIT_DTYPES, low=-100, high=100))
    form = draw(s.choice("tensor", "number", "number first"))
    if form == "tensor":
        return s.call(x, draw_operand_for(draw, s, x, dtype=BIT_DTYPES, number=False, low=-100, high=100))
    number = draw(s.booleans() if x.dtype == torch.bool else s.integers(0, 100))
    return s.call(x, number) if form == "number" else s.call(number, x)


bitwise_and = _declare_bitwise(
    "bitwise_and",
    "__and__",
    "Bits set in both ``x`` and ``y``; logical AND for bools.",
    binary_lowering("BitwiseAnd", logical="And"),
    _draw_bits,
)
bitwise_or = _declare_bitwise(
    "bitwise_or",
    "__or__",
    "Bits set in ``x`` or in ``y``; logical OR for bools.",
    binary_lowering("BitwiseOr", logical="Or"),
    _draw_bits,
)
bitwise_xor = _declare_bitwise(
    "bitwise_xor",
    "__xor__",
    "Bits set in one of ``x`` and ``y``; logical XOR for bools.",
    binary_lowering("BitwiseXor", logical="Xor"),
    _draw_bits,
)


@operator(aten.bitwise_not.default, error=EXACT)
def bitwise_not(x: Tensor) -> Tensor:
    """All bits flipped; logical NOT for bools."""
    return torch.bitwise_not(x)


@bitwise_not.onnx
def _(op, x):
    return op.Not(x) if op.dtype(x) == torch.bool else op.BitwiseNot(x)


bitwise_not.samples(unary_sampler(dtype=BIT_DTYPES))


def _lower_left_shift(op, x, y):
    dtype = op.result.dtype
    x, y = op.promote(*op.promote(x, y), to=torch.int64)
    shifted = _shift(op, x, op.cast(y, torch.uint64), "LEFT")
    fits = op.And(op.GreaterOrEqual(y, op.like(y, 0)), op.Less(y, op.like(y, torch.iinfo(dtype).bits)))
    return op.cast(op.Where(fits, shifted, op.like(x, 0)), dtype)


def _lower_right_shift(op, x, y):
    dtype = op.result.dtype
    x, y = op.promote(*op.promote(x, y), to=torch.int64)
    last = op.like(y, 63)  # a larger shift leaves only the sign; a negative one counts as larger
    amount = op.Where(op.Less(y, op.like(y, 0)), last, lower_min_max(op, "Min", y, last))
    is_negative = op.Less(x, op.like(x, 0))
    sign = op.Where(is_negative, op.like(x, -1), op.like(x, 0))  # flipping the bits makes negatives positive
    shifted = _shift(op, op.BitwiseXor(x, sign), op.cast(amount, torch.uint64), "RIGHT")
    return op.cast(op.BitwiseXor(shifted, sign), dtype)


def _shift(op, x, amount, direction: str):
    """Shift int64 as uint64: ONNX shifts unsigned integers only."""
    return op.cast(op.BitShift(op.cast(x, torch.uint64), amount, direction=direction), torch.int64)


def _draw_shift(draw, s):
    x = draw(s.tensor(dtype=INTS, low=-100, high=100))
    form = draw(s.choice("number", "tensor", "number first"))
    if form == "number first":
        return s.call(draw(s.integers(0, 9)), draw(s.tensor(dtype=INTS, low=0, high=7)))
    if form == "number":
        return s.call(x, draw(s.integers(0, 7)))
    return s.call(x, draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0, high=40)))


bitwise_left_shift = _declare_bitwise(
    "bitwise_left_shift",
    "__lshift__",
    "``x * 2**y`` of integers, elementwise, without the bits that overflow.",
    _lower_left_shift,
    _draw_shift,
)
bitwise_right_shift = _declare_bitwise(
    "bitwise_right_shift",
    "__rshift__",
    "``floor(x / 2**y)`` of integers, elementwise.",
    _lower_right_shift,
    _draw_shift,
)


@operator(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, error=EXACT)
def where(condition: Tensor, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x`` where the condition is True and ``y`` elsewhere; all broadcast."""
    return torch.where(condition.bool(), x, y)


@where.onnx
def _(op, condition, x, y):
    return choose(op, op.cast(condition, torch.bool), *op.promote(x, y))


@where.samples
def _(draw, s):
    condition = draw(s.tensor(dtype=(torch.bool, torch.uint8), low=0, high=1))
    x = draw_operand_for(draw, s, condition, dtype=ALL_DTYPES, number=True)
    return s.call(condition, x, draw_operand_for(draw, s, condition, dtype=ALL_DTYPES, number=True))


@operator(aten.masked_fill.Scalar, aten.masked_fill.Tensor, error=EXACT)
def masked_fill(x: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    """``value``, in the dtype of ``x``, where the mask is True, and ``x`` elsewhere."""
    return torch.masked_fill(x, mask, value)


@masked_fill.onnx
def _(op, x, mask, value):
    return choose(op, op.cast(mask, torch.bool), *op.promote(value, x))


@masked_fill.samples
def _(draw, s):
    x = draw(s.tensor(dtype=ALL_DTYPES))
    mask = draw_operand_for(draw, s, x, dtype=(torch.bool,), number=False)
    value = draw(s.tensor(rank=0, dtype=(x.dtype,))) if draw(s.booleans()) else draw(s.integers(0, 1))
    if x.dtype.is_floating_point and draw(s.booleans()):
        value = draw(s.choice(float("-inf"), -1e4))
    return s.call(x, mask, value)


@operator(aten.heaviside.default, error=EXACT)
def heaviside(x: Tensor, values: Tensor) -> Tensor:
    """0 where ``x < 0``, 1 where ``x > 0``, ``values`` where ``x`` is 0."""
    return torch.heaviside(x, values)


@heaviside.onnx
def _(op, x, values):
    x, values = op.promote(x, values, to=common_dtype(op, x, values))
    zero = op.like(x, 0)
    step = op.cast(op.Greater(x, zero), op.dtype(x))
    return choose(op, op.Equal(x, zero), values, step)


heaviside.samples(binary_sampler(dtype=NUMBERS, number=False, mixed=False, low=-2, high=2))
