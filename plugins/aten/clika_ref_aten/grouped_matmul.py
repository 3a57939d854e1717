"""Grouped matrix products: one matrix per group of rows, as in mixture-of-experts layers."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import DOT
from clika_ref.core.errors import TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_aten.float_layers import float_layer

OFFSET_DTYPES = (torch.int32, torch.int64)


@operator(error=DOT, quant=float_layer(matrices=1, axis=-1))
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x[ends[i - 1]:ends[i]] @ weight[i]``, concatenated: ``x[s, k]`` and ``weight[g, k, n]`` to ``[s, n]``.

    ``ends[g]`` is sorted; rows after the last end become zeros.
    """
    parts, start = [], 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        parts.append(x[start:end] @ matrix)
        start = end
    rest = x.new_zeros(x.shape[0] - start, weight.shape[2])
    return torch.cat([*parts, rest])


@grouped_mm.types
def _(x, weight, ends):
    return TensorType(x.dtype, (x.shape[0], weight.shape[2]))


@grouped_mm.onnx
def _(op, x, weight, ends):
    groups, columns = op.shape(weight)[0], op.shape(weight)[2]
    if is_symbolic(groups):
        msg = f"grouped_mm with a dynamic number of groups ({groups}) has no ONNX equivalent. Make it static."
        raise TargetError(msg)
    if not groups:
        return op.Expand(op.like(x, 0.0), op.ints(op.result.shape))
    first, rows, ends = op.ints([0]), op.Shape(x, start=0, end=1), op.cast(ends, torch.int64)
    stops = op.Split(ends, axis=0, num_outputs=groups, outputs=groups) if groups > 1 else [ends]
    parts = []
    for i, (start, stop) in enumerate(zip([first, *stops[:-1]], stops, strict=True)):
        matrix = op.Gather(weight, op.scalar(i, torch.int64), axis=0)
        parts.append(op.MatMul(op.Slice(x, start, stop, first), matrix))
    shape = op.Concat(op.Sub(rows, stops[-1]), op.ints([columns]), axis=0)
    return op.Concat(*parts, op.Expand(op.like(x, 0.0), shape), axis=0)


@grouped_mm.samples
def _(draw, s):
    groups, k, n = draw(s.integers(1, 4)), draw(s.integers(1, 4)), draw(s.integers(1, 4))
    dtype = draw(s.choice(torch.float32, torch.float64))
    rows = draw(s.integers(0, 9))
    x = draw(s.tensor(shape=(rows, k), dtype=dtype))
    ends = torch.tensor(sorted(draw(s.integers(0, rows)) for _ in range(groups)), dtype=draw(s.choice(*OFFSET_DTYPES)))
    return s.call(x, draw(s.tensor(shape=(groups, k, n), dtype=dtype)), ends)


@grouped_mm.from_torch("transformers.grouped_mm_fallback.default")
def _(input, weight, offs):
    return grouped_mm.call(input, weight, offs)
