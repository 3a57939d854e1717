"""``quantize`` and ``dequantize``: floats to low-bit integers and back, per tensor, per axis or block-wise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import Dim, TensorType
from clika_ref_aten.exported_quantization import (
    FOUR_BITS,
    INT4_OPSET,
    export_dequantize,
    export_low_bit_dequantize,
    export_quantize,
)

QUANTIZED_DTYPES = (torch.int8, torch.uint8)
"""Result dtypes of ``quantize``; INT4 uses them with a narrower range, and is packed where it is stored."""

DEQUANTIZE_DTYPES = (torch.int8, torch.uint8, torch.int32)
"""Operand dtypes of ``dequantize``; biases are stored as int32."""

EIGHT_BITS = 8
"""The other supported bit width of quantized integers, in addition to `FOUR_BITS`."""

HALF_SCALE_OPSET = 19
"""The first opset with FP16 or BF16 scales."""

SAMPLE_RANGES = (
    (torch.int8, None, None),
    (torch.uint8, None, None),
    (torch.int8, -127, 127),
    (torch.int8, -8, 7),
    (torch.uint8, 0, 15),
    (torch.uint8, 1, None),
)
"""Integer ranges to draw: full and symmetric INT8, INT4, and one with a narrower end."""

SAMPLE_SCALES = (1.0, 0.03125, 0.05, 1 / 3)
"""Scales to draw: powers of two produce rounding ties, the others have no exact reciprocal."""

SCALE_DOMAIN = (2.0**-126, 2.0**100)
"""Scales are positive; the lower bound is the smallest normal number of float32."""


@operator(error=EXACT)
def quantize(
    x: Tensor,
    scale: Tensor | Number,
    zero_point: Tensor | Number,
    *,
    dtype: torch.dtype = torch.int8,
    quant_min: int | None = None,
    quant_max: int | None = None,
    axis: int | None = None,
) -> Tensor:
    """``clamp(round(x / scale) + zero_point, quant_min, quant_max)`` as ``dtype``; ties round to even.

    The division is in float32, as in runtimes; PyTorch's own quantizer multiplies by the reciprocal, which differs by
    one step at some ties. ``axis`` None: one scale for all elements; otherwise ``scale[c]`` and ``zero_point[c]`` apply
    along that dim of ``x``. A bound of None is that of the dtype. The result for NaN is undefined.

    Raises:
        ModelError: the range exceeds that of the dtype, or a number is not a valid scale or zero point.
    """
    low, high = integer_bounds(dtype, quant_min, quant_max)
    _check_scale_and_zero_point(scale, zero_point, dtype)
    if torch.compiler.is_exporting() and (axis is not None or quant_min is quant_max is None):
        return export_quantize(x, scale, zero_point, low, high, dtype=dtype, axis=axis)
    steps = (
        torch.div(x.float(), _reshape_along_axis(scale, x, axis))
        .round_()
        .add_(_reshape_along_axis(zero_point, x, axis))
    )
    return steps.clamp_(low, high).to(dtype)


def integer_bounds(dtype: torch.dtype, quant_min: int | None, quant_max: int | None) -> tuple[int, int]:
    """Return the smallest and the largest integer of a quantized range.

    Raises:
        ModelError: the dtype is not in `QUANTIZED_DTYPES`, or the range exceeds that of the dtype.
    """
    if dtype not in QUANTIZED_DTYPES:
        raise ModelError(f"quantize supports {', '.join(map(str, QUANTIZED_DTYPES))}, not {dtype}")
    info = torch.iinfo(dtype)
    low = info.min if quant_min is None else quant_min
    high = info.max if quant_max is None else quant_max
    if not info.min <= low < high <= info.max:
        raise ModelError(
            f"the quantized range [{low}, {high}] must not be empty, and must be within that of {dtype}, [{info.min}, "
            f"{info.max}]"
        )
    return low, high


def _check_scale_and_zero_point(scale: Tensor | Number, zero_point: Tensor | Number | None, dtype: torch.dtype) -> None:
    """Reject a number that is not a valid scale, or not a zero point of the dtype; tensors are not checked."""
    if isinstance(scale, int | float) and not 0 < scale < math.inf:
        raise ModelError(f"a scale of {scale} is invalid. It must be above 0 and finite.")
    info = torch.iinfo(dtype)
    if isinstance(zero_point, int | float) and (zero_point % 1 or not info.min <= zero_point <= info.max):
        raise ModelError(f"a zero point of {zero_point} is outside the range of {dtype}, [{info.min}, {info.max}]")


def _reshape_along_axis(parameter: Tensor | Number, x: Tensor, axis: int | None) -> Tensor | Number:
    """Return a scale or zero point in float32, reshaped to broadcast along the axis."""
    if not isinstance(parameter, Tensor):
        return float(parameter)  # float32 arithmetic rounds it; a tensor would cause graph breaks in torch.compile
    return parameter.float() if axis is None else parameter.float().reshape(_axis_shape(x.ndim, axis))


def _axis_shape(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(-1 if i == axis % rank else 1 for i in range(rank))


def _check_qparam_shapes(x: TensorType, axis: int | None, *parameters: object) -> None:
    """Reject an axis that does not exist, and parameters without exactly one element per index of the axis."""
    if axis is not None and not -x.rank <= axis < x.rank:
        raise ModelError(f"axis {axis} of {x} does not exist")
    for parameter in parameters:
        if axis is None:
            fits = not isinstance(parameter, TensorType) or parameter.rank == 0
            expected = "a number or a 0-d tensor"
        else:
            fits = isinstance(parameter, TensorType) and parameter.shape == (x.shape[axis],)
            expected = f"[{x.shape[axis]}], one for each index along axis {axis}"
        if parameter is not None and not fits:
            raise ModelError(f"scale and zero point of {x} must be {expected}, not {parameter}")


@quantize.types
def _(x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    integer_bounds(dtype, quant_min, quant_max)
    _check_scale_and_zero_point(scale, zero_point, dtype)
    _check_qparam_shapes(x, axis, scale, zero_point)
    return TensorType(dtype, x.shape)


@quantize.onnx
def _(op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    kind = _computation_dtype(op, scale, op.dtype(x))
    scale, zero_point = op.promote(scale, to=kind)[0], op.promote(zero_point, to=dtype)[0]
    result = op.QuantizeLinear(op.cast(x, kind), scale, zero_point, axis=axis)
    op.declare(result, dtype)
    low, high = (None if end is None else op.constant(end, dtype) for end in (quant_min, quant_max))
    return result if low is None and high is None else op.Clip(result, low, high)


def _computation_dtype(op, scale, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the computation in ONNX: ``dtype`` if the scale has it too, otherwise float32."""
    if isinstance(scale, int | float) or op.dtype(scale) != dtype or dtype == torch.float32:
        return torch.float32
    op.require_opset(HALF_SCALE_OPSET)
    return dtype


@quantize.samples
def _(draw, s):
    dtype, quant_min, quant_max = draw(s.choice(*SAMPLE_RANGES))
    low, high = integer_bounds(dtype, quant_min, quant_max)
    axis = draw(s.choice(None, None, 0, 1, -1))
    rank = (0, 5) if axis is None else (2, 5)
    reach = 4.0 if high > 15 else 1.0
    floats = (torch.float32, torch.float16)
    x = draw(s.tensor(rank=rank, size=(1, 4), dtype=floats, low=-reach, high=reach, nan=False))
    attrs = {"dtype": dtype, "quant_min": quant_min, "quant_max": quant_max, "axis": axis}
    return s.call(x, *_draw_qparams(draw, s, x, axis, (dtype, torch.int32, torch.int64), low, high), **attrs)


def _draw_qparams(draw, s, x, axis: int | None, dtypes: tuple[torch.dtype, ...], low: int, high: int):
    """Draw the scale and the zero point."""
    limits = {"low": low, "high": high, "domain": (low, high)}
    scales = {"low": 0.02, "high": 0.1, "domain": SCALE_DOMAIN}
    if axis is not None:
        shape = (x.shape[axis],)
    elif draw(s.booleans()):
        shape = ()
    else:
        return draw(s.choice(*SAMPLE_SCALES)), draw(s.choice((low + high + 1) // 2, low, high, low + 7))
    return draw(s.tensor(shape=shape, **scales)), draw(s.tensor(shape=shape, dtype=draw(s.choice(*dtypes)), **limits))


@operator(error=ulp(1))
def dequantize(
    x: Tensor,
    scale: Tensor | Number,
    zero_point: Tensor | Number | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    axis: int | None = None,
    block_size: int | None = None,
    bits: int = 8,
) -> Tensor:
    """``(x - zero_point) * scale`` as ``dtype``: the difference exact, the product in float32.

    ``axis`` None: one scale for all elements; otherwise ``scale[c]`` and ``zero_point[c]`` apply along that dim of
    ``x``. With a ``block_size``, that many neighbours along the axis share a scale: ``scale`` has the shape of ``x``,
    except that this dim is ``block_size`` times smaller. A zero point of None is 0. ``bits=4`` marks the integers as
    INT4, and a constant is stored as such.

    Raises:
        ModelError: a number is not a valid scale or zero point.
    """
    _check_scale_and_zero_point(scale, zero_point, x.dtype)
    if torch.compiler.is_exporting() and block_size is None and bits == EIGHT_BITS:
        return export_dequantize(x, scale, zero_point, dtype=dtype, axis=axis)
    if torch.compiler.is_exporting() and isinstance(scale, Tensor) and torch.onnx.is_in_onnx_export():
        return export_low_bit_dequantize(x, scale, dtype=dtype, axis=axis, block_size=block_size, bits=bits)
    steps = x.to(torch.float32 if x.dtype in QUANTIZED_DTYPES else torch.int64)  # they hold the differences
    if isinstance(zero_point, Tensor):
        zero_point = (
            zero_point.to(steps.dtype)
            if axis is None
            else zero_point.to(steps.dtype).reshape(_axis_shape(x.ndim, axis))
        )
    if zero_point is not None:
        steps.sub_(zero_point)
    if block_size is not None and isinstance(scale, Tensor):
        return steps.float().mul_(scale.float().repeat_interleave(block_size, axis)).to(dtype)
    return steps.float().mul_(_reshape_along_axis(scale, x, axis)).to(dtype)


@dequantize.types
def _(x, scale, zero_point, *, dtype, axis, block_size, bits):
    if x.dtype not in DEQUANTIZE_DTYPES:
        raise ModelError(f"dequantize supports {', '.join(map(str, DEQUANTIZE_DTYPES))}, not {x}")
    _check_scale_and_zero_point(scale, zero_point, x.dtype)
    if block_size is None:
        _check_qparam_shapes(x, axis, scale, zero_point)
    else:
        _check_blocks(x, axis, block_size, scale)
    if bits not in (FOUR_BITS, EIGHT_BITS):
        raise ModelError(f"dequantize supports {EIGHT_BITS} or {FOUR_BITS} bits, not {bits}")
    if (bits == FOUR_BITS or block_size is not None) and (x.dtype != torch.int8 or zero_point is not None):
        raise ModelError(
            f"blocks and {FOUR_BITS}-bit integers are stored in int8 without a zero point; {x} has {zero_point}"
        )
    return TensorType(dtype, x.shape)


def _check_blocks(x: TensorType, axis: int | None, block_size: int, scale: object) -> None:
    """Reject a block size that does not divide the axis, and scales without one element per block."""
    _check_qparam_shapes(x, axis)
    if axis is None or block_size < 1 or is_symbolic(x.shape[axis]) or int(x.shape[axis]) % block_size:
        raise ModelError(f"blocks of {block_size} along axis {axis} do not divide {x}")
    position = axis % x.rank
    shape = (*x.shape[:position], int(x.shape[axis]) // block_size, *x.shape[position + 1 :])
    if not isinstance(scale, TensorType) or scale.shape != shape:
        raise ModelError(f"the scales of blocks of {block_size} of {x} must be {list(shape)}, not {scale}")


@dequantize.onnx
def _(op, x, scale, zero_point, *, dtype, axis, block_size, bits):
    if block_size is not None or bits == FOUR_BITS:
        return _lower_low_bit_dequantize(op, x, scale, dtype=dtype, axis=axis, block_size=block_size, bits=bits)
    stored, shape = op.dtype(x), () if isinstance(scale, int | float) else op.shape(scale)
    kind = torch.float32 if stored == torch.int32 else _computation_dtype(op, scale, dtype)
    (scale,) = op.promote(scale, to=kind)
    if stored == torch.int32 and zero_point is not None:  # ONNX has no zero point for int32
        offset = op.promote(zero_point, to=torch.int64)[0]
        if axis is not None:
            offset, scale = (op.Reshape(p, op.ints(_axis_shape(op.rank(x), axis))) for p in (offset, scale))
        steps = op.cast(op.Sub(op.cast(x, torch.int64), offset), torch.float32)
        return op.cast(op.Mul(steps, scale), dtype)
    if zero_point is not None:
        (zero_point,) = op.promote(zero_point, to=stored)
    elif stored == torch.int8:  # ONNX Runtime 1.31 moves the next node before it, via uint8 if no dtype is given
        zero_point = _zeros(op, shape, stored)
    result = op.DequantizeLinear(x, scale, zero_point, axis=axis)
    return op.cast(op.declare(result, kind), dtype)


def _lower_low_bit_dequantize(op, x, scale, *, dtype, axis, block_size, bits):
    """Lower block-wise and INT4 dequantization, which need a newer opset."""
    op.require_opset(INT4_OPSET)
    is_one_block = block_size is not None and op.shape(scale) == (1,)
    kind = _computation_dtype(op, scale, dtype)
    (scale,) = op.promote(scale, to=kind)
    if is_one_block:  # ONNX Runtime 1.31 treats a vector of one scale as a per-tensor scale
        scale, axis, block_size = op.Reshape(scale, op.ints([])), None, None
    result = op.DequantizeLinear(op.as_int4(x) if bits == FOUR_BITS else x, scale, axis=axis, block_size=block_size)
    return op.cast(op.declare(result, kind), dtype)


def _zeros(op, shape: tuple[Dim, ...], dtype: torch.dtype):
    """Return one zero per scale, as a constant if the shape is static."""
    known = [size for size in shape if isinstance(size, int)]
    if len(known) < len(shape):
        return op.Expand(op.scalar(0, dtype), op.ints(shape))
    return op.constant(torch.zeros(known), dtype)


@dequantize.samples
def _(draw, s):
    low_bit = draw(s.choice(None, None, (FOUR_BITS, None), (FOUR_BITS, 2), (EIGHT_BITS, 2), (EIGHT_BITS, 16)))
    if low_bit is not None:
        return _draw_low_bit(draw, s, *low_bit)
    stored = draw(s.choice(*DEQUANTIZE_DTYPES))
    axis = draw(s.choice(None, None, 0, 1, -1))
    low, high = (-(2**30), 2**30) if stored == torch.int32 else integer_bounds(stored, None, None)
    x = draw(s.tensor(rank=(0, 5) if axis is None else (2, 4), size=(1, 4), dtype=stored, low=low, high=high))
    scale, zero_point = _draw_qparams(draw, s, x, axis, (stored, torch.int32, torch.int64), low, high)
    dtype = draw(s.choice(torch.float32, torch.float16 if stored != torch.int32 else torch.float64))
    return s.call(x, scale, draw(s.choice(zero_point, None)), dtype=dtype, axis=axis)


def _draw_low_bit(draw, s, bits: int, block_size: int | None):
    """Draw INT4 and block-wise quantized integers, without zero points, like weights."""
    low, high = (-8, 7) if bits == FOUR_BITS else (-127, 127)
    rank = draw(s.integers(1, 3))
    axis = draw(s.integers(-rank, rank - 1))
    shape = [draw(s.integers(1, 4)) for _ in range(rank)]
    blocks = [*shape]
    shape[axis] *= block_size or 1
    x = draw(s.tensor(shape=tuple(shape), dtype=torch.int8, low=low, high=high, domain=(low, high)))
    scales = tuple(blocks) if block_size else (shape[axis],)
    scale = draw(s.tensor(shape=scales, low=0.02, high=0.1, domain=SCALE_DOMAIN))
    dtype = draw(s.choice(torch.float32, torch.float16))
    return s.call(x, scale, None, dtype=dtype, axis=axis, block_size=block_size, bits=bits)


def _quantize_call(x, scale, zero_point, *rest):
    *axis, quant_min, quant_max, dtype = rest
    own = torch.iinfo(dtype)
    low, high = (None if end == limits else end for end, limits in ((quant_min, own.min), (quant_max, own.max)))
    chosen = {"axis": axis[0]} if axis else {}
    return quantize.call(x, scale, zero_point, dtype=dtype, quant_min=low, quant_max=high, **chosen)


quantize.from_torch(
    "quantized_decomposed.quantize_per_tensor.default",
    "quantized_decomposed.quantize_per_tensor.tensor",
    "quantized_decomposed.quantize_per_channel.default",
)(_quantize_call)


def _dequantize_call(x, scale, zero_point, *rest, out_dtype=None):
    axis = {"axis": rest[0]} if len(rest) == len(("axis", "quant_min", "quant_max", "dtype")) else {}
    return dequantize.call(x, scale, zero_point, dtype=out_dtype or torch.float32, **axis)


dequantize.from_torch(
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_channel.default",
)(_dequantize_call)
