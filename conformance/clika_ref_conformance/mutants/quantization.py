"""Faults of quantization: rounding, ranges, axes, and INT4 packing."""

from __future__ import annotations

from unittest.mock import patch

import torch

import clika_ref_conformance.levels.quantization as level
from clika_ref.onnx_export import builder
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("quantization")
LEVELS = ("operators", "quantization")


def _swap_nibbles(packed):
    return (packed >> 4) | (packed << 4)


def _replace_quantize(compute):
    """Return a per-tensor lowering of quantize with its integer values, as floats, from ``compute``."""

    def lower(original, op, x, scale, zero, *, dtype, quant_min, quant_max, axis):
        if axis is not None:
            return original(op, x, scale, zero, dtype=dtype, quant_min=quant_min, quant_max=quant_max, axis=axis)
        info = torch.iinfo(dtype)
        low = op.scalar(info.min if quant_min is None else quant_min, torch.float32)
        high = op.scalar(info.max if quant_max is None else quant_max, torch.float32)
        x, scale, zero = op.cast(x, torch.float32), *op.promote(scale, zero, to=torch.float32)
        return op.cast(op.cast(compute(op, x, scale, zero, low, high), torch.int32), dtype)

    return lower


def _clip(op, codes, low, high):
    return op.Max(op.Min(codes, high), low)


@FAULTS.lowering("quantize", "codes are clamped before the zero point is added", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    return _clip(op, op.Add(_clip(op, op.Round(op.Div(x, scale)), low, high), zero), low, high)


@FAULTS.lowering("quantize", "ties are rounded up", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    steps = op.Floor(op.Add(op.Div(x, scale), op.scalar(0.5, torch.float32)))
    return _clip(op, op.Add(steps, zero), low, high)


@FAULTS.lowering("quantize", "codes are truncated", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    steps = op.cast(op.cast(_clip(op, op.Div(x, scale), op.Neg(high), high), torch.int32), torch.float32)
    return _clip(op, op.Add(steps, zero), low, high)


@FAULTS.lowering("quantize", "the division is a product with the reciprocal", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    return _clip(op, op.Add(op.Round(op.Mul(x, op.Reciprocal(scale))), zero), low, high)


@FAULTS.lowering("quantize", "the zero point is added before rounding, which changes ties", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    return _clip(op, op.Round(op.Add(op.Div(x, scale), zero)), low, high)


@FAULTS.lowering("quantize", "codes beyond the range wrap around", levels=LEVELS)
@_replace_quantize
def _(op, x, scale, zero, low, high):
    return op.Add(op.Round(op.Div(x, scale)), zero)


@FAULTS.lowering("quantize", "the minimum of int8 is -127", levels=LEVELS)
def _(original, op, x, scale, zero, *, dtype, quant_min, **attrs):
    lowest = -127 if dtype == torch.int8 and quant_min is None else quant_min
    return original(op, x, scale, zero, dtype=dtype, quant_min=lowest, **attrs)


FAULTS.attribute_values(
    "quantize", "narrower ranges use the min/max of the dtype", levels=LEVELS, quant_min=None, quant_max=None
)


FAULTS.node_attributes(
    "quantize", "scales are along dim 1, the default of ONNX", "QuantizeLinear", levels=LEVELS, axis=None
)


@FAULTS.lowering("quantize", "the scale is stored in FP16", levels=LEVELS)
def _(original, op, x, scale, zero, **attrs):
    def write(op, x, scale, *rest, **how):
        return op.QuantizeLinear(x, op.cast(op.cast(scale, torch.float16), torch.float32), *rest, **how)

    return original(PatchedOp(op, QuantizeLinear=write), x, scale, zero, **attrs)


@FAULTS.lowering("quantize", "a symmetric uint8 range has the zero point 127", levels=LEVELS)
def _(original, op, x, scale, zero, **attrs):
    return original(op, x, scale, 127 if isinstance(zero, int) and zero == 128 else zero, **attrs)


@FAULTS.lowering("dequantize", "a zero point per tensor is ignored", levels=LEVELS)
def _(original, op, x, scale, zero=None, *, axis, **attrs):
    return original(op, x, scale, zero if axis is not None else None, axis=axis, **attrs)


@FAULTS.lowering("dequantize", "the zero point is subtracted after scaling", levels=LEVELS)
def _(original, op, x, scale, zero=None, *, dtype, axis, **few):
    if zero is None or axis is not None:
        return original(op, x, scale, zero, dtype=dtype, axis=axis, **few)
    plain = original(op, x, scale, None, dtype=dtype, axis=axis, **few)
    return op.Sub(plain, *op.promote(zero, to=dtype))


FAULTS.node_attributes(
    "dequantize", "scales are along dim 1, the default of ONNX", "DequantizeLinear", levels=LEVELS, axis=None
)


@FAULTS.lowering("dequantize", "the product is rounded to FP16", levels=LEVELS)
def _(original, op, *operands, **attrs):
    result = original(op, *operands, **attrs)
    return op.cast(op.cast(result, torch.float16), op.result.dtype)


@FAULTS.lowering("dequantize", "the zero point of int32 is ignored", levels=LEVELS)
def _(original, op, x, scale, zero=None, **attrs):
    return original(op, x, scale, None if op.dtype(x) == torch.int32 else zero, **attrs)


@FAULTS.lowering("dequantize", "elements at a distance of one block share a scale instead of neighbors", levels=LEVELS)
def _(original, op, x, scale, zero=None, *, dtype, axis, block_size, **few):
    if block_size is None:
        return original(op, x, scale, zero, dtype=dtype, axis=axis, block_size=block_size, **few)
    repeated = op.Concat(*[scale] * block_size, axis=axis)
    return op.cast(op.Mul(op.cast(x, torch.float32), repeated), dtype)


@FAULTS.lowering("dequantize", "blocks are along the last dim", levels=LEVELS)
def _(original, op, x, scale, zero=None, *, axis, block_size, **few):
    along = axis if block_size is None else -1
    return original(op, x, scale, zero, axis=along, block_size=block_size, **few)


@FAULTS.function(
    "dequantize", "an INT4 constant is written with its pairs swapped", builder, "pack_int4", "quantization"
)
def _(original, x):
    return _swap_nibbles(original(x))


@FAULTS.function(
    "quantize", "the first of two packed INT4 values is in the high half", level, "pack_int4", "quantization"
)
def _(original, x):
    return _swap_nibbles(original(x))


@FAULTS.function("quantize", "packed INT4 values lose their sign", level, "unpack_int4", "quantization")
def _(original, packed, shape, dtype):
    return original(packed, shape, torch.uint8).to(dtype)


@FAULTS.function(
    "quantize", "the last of an odd number of packed INT4 values is lost", level, "pack_int4", "quantization"
)
def _(original, x):
    return original(x[: len(x) // 2 * 2])


@FAULTS.patch("quantize", "halves of bytes are swapped both in packing and unpacking", levels=("quantization",))
def _(registry):
    pack, unpack = level.pack_int4, level.unpack_int4

    with (
        patch.object(level, "pack_int4", lambda x: _swap_nibbles(pack(x))),
        patch.object(level, "unpack_int4", lambda packed, *rest: unpack(_swap_nibbles(packed), *rest)),
    ):
        yield
