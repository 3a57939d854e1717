"""Embedding lookups: one row per index, or one row per bag of indices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT, ulp
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import LOOKUP, OWN_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.exported_quantization import FOUR_BITS, INT4_OPSET
from clika_ref_aten.quantization import EIGHT_BITS, SCALE_DOMAIN

aten = torch.ops.aten

BAG_SUM, BAG_MEAN, BAG_MAX = range(3)
"""ATen's numbering of the reductions of a bag."""

NIBBLE_OFFSET = 8
"""Added to 4-bit integers to store them as unsigned halves of a byte."""

MIN_FUSED_BLOCK = 16
"""Smallest block size of GatherBlockQuantized, which only knows powers of two."""


@operator(aten.embedding.default, quant=LOOKUP, error=EXACT)
def embedding(
    weight: Tensor,
    indices: Tensor,
    *,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Take the rows ``indices[...]`` of ``weight[n, d]``; the attributes affect the gradient only."""
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)


@embedding.onnx
def _(op, weight, indices, *, padding_idx, scale_grad_by_freq, sparse):
    return op.Gather(weight, indices, axis=0)


@embedding.samples
def _(draw, s):
    weight = draw(s.tensor(rank=2))
    last = weight.shape[0] - 1
    indices = draw(s.tensor(rank=(0, 3), dtype=(torch.int64, torch.int32), low=0, high=last, domain=(0, last)))
    return s.call(
        weight,
        indices,
        padding_idx=draw(s.choice(-1, 0)),
        scale_grad_by_freq=draw(s.booleans()),
        sparse=draw(s.booleans()),
    )


@operator(error=ulp(1))
def quantized_embedding(
    table: Tensor,
    scales: Tensor,
    indices: Tensor,
    *,
    bits: int = EIGHT_BITS,
    dtype: torch.dtype = torch.float32,
    is_fused: bool = False,
) -> Tensor:
    """Take the rows ``indices[...]`` of a quantized ``table[n, d]``, and dequantize only these.

    Each row consists of equal blocks, and ``scales[n, blocks]`` has a scale for each. ``bits=4`` marks the elements as
    INT4, and a constant table is stored as such. ``is_fused`` selects ONNX Runtime's operator for this call.
    """
    rows, factors = torch.embedding(table, indices), torch.embedding(scales.float(), indices)
    blocks = rows.float().reshape(*factors.shape, table.shape[1] // scales.shape[1])
    return blocks.mul_(factors.unsqueeze(-1)).reshape(rows.shape).to(dtype)


@quantized_embedding.types
def _(table, scales, indices, *, bits, dtype, is_fused):
    (count, width), (rows, blocks) = table.shape, scales.shape
    fits = count == rows and width % blocks == 0
    if table.dtype != torch.int8 or bits not in (FOUR_BITS, EIGHT_BITS) or not fits:
        raise ModelError(f"scales {scales} do not fit the table {table} with {bits} bits")
    return TensorType(dtype, (*indices.shape, width))


@quantized_embedding.onnx
def _(op, table, scales, indices, *, bits, dtype, is_fused):
    width, blocks = op.shape(table)[1], op.shape(scales)[1]
    if not width:
        return op.Expand(op.scalar(0.0, dtype), op.ints(op.result.shape))
    if is_fused and bits == FOUR_BITS and op.is_constant(table) and _is_fusible(width, blocks):
        return _gather_blocks(op, table, scales, indices, dtype=dtype)
    kind = dtype if op.dtype(scales) == dtype else torch.float32
    factors = op.cast(op.Gather(scales, indices, axis=0), kind)
    packed = bits == FOUR_BITS and op.is_constant(table)
    rows = _gather_halves(op, table, indices) if packed else op.cast(op.Gather(table, indices, axis=0), kind)
    rows = op.cast(rows, kind)
    if blocks == 1:
        return op.cast(op.Mul(rows, factors), dtype)
    # 0 keeps the size of the operand. ONNX Runtime infers an only computed size, which fails without elements.
    kept = op.result.shape[:-1] if is_symbolic(blocks) or is_symbolic(width) else (0,) * op.rank(indices)
    split = op.Reshape(rows, op.ints((*kept, blocks, width // blocks)))
    product = op.Mul(split, op.Unsqueeze(factors, op.ints([-1])))
    return op.cast(op.Reshape(product, op.ints((*kept, width))), dtype)


def _is_fusible(width: int, blocks: int) -> bool:
    """Return whether GatherBlockQuantized knows these blocks; a row with one scale is part of a larger block."""
    size = width // blocks
    return width % 2 == 0 and (blocks == 1 or (size >= MIN_FUSED_BLOCK and size & (size - 1) == 0))


def _gather_halves(op, table, indices):
    """Return rows of a table with two elements in each byte, as float32."""
    width = op.shape(table)[1]
    row = op.cast(op.Gather(op.as_bytes_of_halves(table, NIBBLE_OFFSET), indices, axis=0), torch.float32)
    base = float(2**FOUR_BITS)
    high = op.Floor(op.Mul(row, op.constant(1 / base, torch.float32)))  # exact, and faster than shifts of bytes
    low = op.Sub(row, op.Mul(high, op.constant(base, torch.float32)))
    halves = op.Concat(*(op.Unsqueeze(half, op.ints([-1])) for half in (low, high)), axis=-1)
    kept = (0,) * op.rank(indices)
    row = op.Reshape(halves, op.ints((*kept, width + width % 2)))
    steps = op.Sub(row, op.constant(float(NIBBLE_OFFSET), torch.float32))
    return op.Slice(steps, op.ints([0]), op.ints([width]), op.ints([-1])) if width % 2 else steps


def _gather_blocks(op, table, scales, indices, *, dtype):
    """Call ONNX Runtime's GatherBlockQuantized; a row with one scale is a block of the next power of two."""
    op.require_opset(INT4_OPSET)
    width, blocks = op.shape(table)[1], op.shape(scales)[1]
    size = max(2 ** (width // blocks - 1).bit_length(), MIN_FUSED_BLOCK)
    attrs = {"gather_axis": 0, "quantize_axis": 1, "block_size": size}
    operands = op.as_int4(table), indices, op.cast(scales, dtype)
    return op.declare(op.node("GatherBlockQuantized", *operands, domain="com.microsoft", **attrs), dtype)


@quantized_embedding.samples
def _(draw, s):
    bits, (rows, blocks) = draw(s.choice(FOUR_BITS, EIGHT_BITS)), (draw(s.integers(1, 5)), draw(s.integers(1, 3)))
    low, high = (-8, 7) if bits == FOUR_BITS else (-128, 127)
    shape = (rows, blocks * draw(s.integers(1, 4)))
    table = draw(s.tensor(shape=shape, dtype=torch.int8, low=low, high=high, domain=(low, high)))
    scales = draw(s.tensor(shape=(rows, blocks), low=0.02, high=0.1, domain=SCALE_DOMAIN))
    indices = draw(s.tensor(rank=(0, 3), dtype=(torch.int64, torch.int32), low=0, high=rows - 1, domain=(0, rows - 1)))
    dtype = draw(s.choice(torch.float32, torch.float16))
    return s.call(table, scales, indices, bits=bits, dtype=dtype, is_fused=draw(s.booleans()))


@operator(aten.embedding_bag.default, aten.embedding_bag.padding_idx, quant=OWN_QPARAMS, error=DOT)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    scale_grad_by_freq: bool = False,
    mode: int = BAG_SUM,
    sparse: bool = False,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum (``mode`` 0), mean (1) or maximum (2) of the rows ``indices[n]`` of ``weight[k, d]``, per bag.

    Bag ``i`` starts at ``offsets[i]`` and ends where the next one starts. Rows ``padding_idx`` do not count; an empty
    bag gives zeros. ``scale_grad_by_freq`` and ``sparse`` affect the gradient only. ATen has three more results, which
    only its gradient uses; they are omitted.
    """
    counted = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
    return aten.embedding_bag.padding_idx(weight, indices, offsets, *counted)[0]


@embedding_bag.types
def _(weight, indices, offsets, per_sample_weights, *, include_last_offset, **others):
    return TensorType(weight.dtype, (offsets.shape[0] - int(include_last_offset), weight.shape[1]))


@embedding_bag.onnx
def _(op, weight, indices, offsets, per_sample_weights, *, mode, padding_idx, **others):
    bags, width = op.result.shape
    if width == 0:
        return op.Expand(op.like(weight, 0), op.ints([bags, 0]))
    bag = _bag_indices(op, indices, offsets)
    if padding_idx is not None:  # an extra bag collects the rows that do not count
        row = op.like(indices, padding_idx % op.shape(weight)[0])
        bag = op.Where(op.Equal(indices, row), op.scalar(bags, torch.int64), bag)
    rows = op.Gather(weight, indices, axis=0)
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, op.ints([1])))
    column = op.Unsqueeze(bag, op.ints([1]))
    result = _reduce_bags(op, weight, column, rows, mode=mode)
    if mode != BAG_SUM:
        result = _finish_reduction(op, weight, result, column, mode=mode)
    return op.Slice(result, op.ints([0]), op.ints([bags]))


def _bag_indices(op, indices, offsets):
    """Return the bag of each index: the number of bags that have started by then, less one."""
    count = op.shape(indices)[0]
    starts = op.Expand(op.constant(0, torch.int64), op.ints([count + 1]))  # the last counts bags that start at the end
    ones = op.Expand(op.constant(1, torch.int64), op.Shape(offsets))
    starts = op.ScatterElements(starts, op.cast(offsets, torch.int64), ones, axis=0, reduction="add")
    begun = op.Slice(op.CumSum(starts, op.constant(0, torch.int64)), op.ints([0]), op.ints([count]))
    return op.Sub(begun, op.constant(1, torch.int64))


def _reduce_bags(op, weight, column, rows, *, mode):
    """Sum the rows of each bag, or take their maximum."""
    bags, width = op.result.shape
    start = op.Expand(op.like(weight, -math.inf if mode == BAG_MAX else 0), op.ints([bags + 1, width]))
    index, reduction = op.Expand(column, op.Shape(rows)), "max" if mode == BAG_MAX else "add"
    return op.ScatterElements(start, index, rows, axis=0, reduction=reduction)


def _finish_reduction(op, weight, result, column, *, mode):
    """Divide the sums by the size of each bag for a mean; set empty bags to zero."""
    start = op.Expand(op.like(weight, 0), op.ints([op.result.shape[0] + 1, 1]))
    ones = op.Expand(op.like(weight, 1), op.Shape(column))
    counts = op.ScatterElements(start, column, ones, axis=0, reduction="add")
    if mode == BAG_MEAN:
        return op.Div(result, op.Max(counts, op.like(weight, 1)))
    return op.Where(op.Equal(counts, op.like(weight, 0)), op.like(weight, 0), result)


@embedding_bag.samples
def _(draw, s):
    weight = draw(s.tensor(rank=2, size=(2, 5)))
    last = draw(s.booleans())
    count = 0 if last else draw(s.integers(1, 6))
    dtype = draw(s.choice(torch.int64, torch.int32))
    rows = weight.shape[0] - 1
    indices = draw(s.tensor(shape=(count,), dtype=dtype, low=0, high=rows, domain=(0, rows)))
    # Offsets must be sorted, but drawn elements are not. Only the last bag has rows; test_selection.py covers others.
    offsets = draw(s.tensor(shape=(1 + draw(s.integers(0, 2)) + last,), dtype=dtype, low=0, high=0, domain=(0, 0)))
    mode = draw(s.choice(BAG_SUM, BAG_MEAN, BAG_MAX))
    per_sample = draw(s.tensor(shape=(count,))) if mode == BAG_SUM and draw(s.booleans()) else None
    return s.call(
        weight,
        indices,
        offsets,
        per_sample,
        mode=mode,
        include_last_offset=last,
        padding_idx=draw(s.choice(None, 0, -1)),
        scale_grad_by_freq=draw(s.booleans()),
        sparse=draw(s.booleans()),
    )
