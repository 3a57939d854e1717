"""Strided views: sliding windows (unfold) and as_strided."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten import slicing
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES, floor_quotient, make_strided_indices, numel_of, same_type

aten = torch.ops.aten


@operator(aten.unfold.default, aten.unfold_copy.default, quant=SHARED_QPARAMS, error=EXACT)
def unfold(x: Tensor, *, dimension: int, size: int, step: int) -> Tensor:
    """Sliding windows of ``size`` elements, ``step`` apart, along ``dimension``; the window is a new last dim."""
    return x.unfold(dimension, size, step)


@unfold.onnx
def _(op, x, *, dimension, size, step):
    rank = op.rank(x)
    if not rank:
        return op.Reshape(x, op.ints([size]))
    dim, shape = dimension % rank, op.shape(x)
    windows = op.result.shape[dim]
    if step == size and windows * size == shape[dim]:
        cut = op.reshape(x, (*shape[:dim], windows, size, *shape[dim + 1 :]))
    else:
        cut = op.Gather(x, make_strided_indices(op, (windows, size), (step, 1), 0), axis=dim)
    order = [i for i in range(rank + 1) if i != dim + 1]
    return cut if dim == rank - 1 else op.Transpose(cut, perm=[*order, dim + 1])


@unfold.types
def _(x, *, dimension, size, step):
    if not x.rank:
        return TensorType(x.dtype, (size,))
    shape = list(x.shape)
    shape[dimension] = floor_quotient(shape[dimension] - size, step) + 1
    return TensorType(x.dtype, (*shape, size))


@unfold.samples
def _(draw, s):
    x = draw(s.tensor(size=(2, 6), dtype=MOVABLE_DTYPES))
    dimension = draw(s.integers(-x.rank, x.rank - 1)) if x.rank else 0
    return s.call(x, dimension=dimension, size=draw(s.integers(1, 2)) if x.rank else 1, step=draw(s.integers(1, 3)))


@unfold.write_back
def _(build, base, new, *, dimension, size, step):
    if not base.type.rank:
        return build(slicing.select, new, dim=0, index=0, types=(base.type,))
    dim = dimension % base.type.rank
    if step < size and new.type.shape[dim] != 1:
        raise ModelError(
            "a write through overlapping windows (unfold) changes elements of several windows. Write to the tensor "
            "instead."
        )
    last = (new.type.shape[dim] - 1) * step
    for i in range(size):
        column = build(slicing.select, new, dim=new.type.rank - 1, index=i)
        base = build(slicing.slice_scatter, base, column, dim=dim, start=i, end=i + last + 1, step=step)
    return base


@operator(quant=SHARED_QPARAMS, error=EXACT)
def as_strided(x: Tensor, *, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int = 0) -> Tensor:
    """``x.flatten()[storage_offset + i * stride[0] + j * stride[1] + ...]`` at ``[i, j, ...]``, for a shape ``size``.

    The elements of ``x`` are those of its memory: ``x`` is assumed to be contiguous.
    """
    whole = x.is_contiguous() and x.storage_offset() == 0
    return (x if whole else x.clone(memory_format=torch.contiguous_format)).as_strided(size, stride, storage_offset)


@as_strided.onnx
def _(op, x, *, size, stride, storage_offset):
    return op.Gather(_flatten(op, x), make_strided_indices(op, size, stride, storage_offset), axis=0)


@as_strided.types
def _(x, *, size, stride, storage_offset):
    return TensorType(x.dtype, size)


@as_strided.samples
def _(draw, s):
    x, attrs = _draw_strided(draw, s)
    return s.call(x, **attrs)


@as_strided.write_back
def _(build, base, new, **attrs):
    return build(as_strided_scatter, base, new, types=(base.type,), **attrs)


@as_strided.from_torch(aten.as_strided.default, aten.as_strided_copy.default)
def _(x, size, stride, storage_offset=None):
    return as_strided.call(x, size=tuple(size), stride=tuple(stride), storage_offset=storage_offset or 0)


@operator(quant=UNIFIED_QPARAMS, error=EXACT)
def as_strided_scatter(
    x: Tensor, src: Tensor, *, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int = 0
) -> Tensor:
    """``x`` with the elements that ``as_strided`` would read replaced by ``src``."""
    # Not torch.as_strided_scatter: its gradient with respect to x is wrong in PyTorch 2.13.
    indices = torch.arange(x.numel(), device=x.device).as_strided(size, stride, storage_offset)
    return x.reshape(-1).index_put((indices.reshape(-1),), src.reshape(-1)).reshape(x.shape)


as_strided_scatter.types(same_type)


@as_strided_scatter.onnx
def _(op, x, src, *, size, stride, storage_offset):
    indices = op.reshape(make_strided_indices(op, size, stride, storage_offset), (numel_of(size),))
    new = op.reshape(op.cast(src, op.dtype(x)), (numel_of(size),))
    return op.reshape(op.ScatterElements(_flatten(op, x), indices, new, axis=0), op.shape(x))


@as_strided_scatter.samples
def _(draw, s):
    x, attrs = _draw_strided(draw, s)
    return s.call(x, draw(s.tensor(shape=attrs["size"], dtype=x.dtype)), **attrs)


@as_strided_scatter.from_torch(aten.as_strided_scatter.default)
def _(x, src, size, stride, storage_offset=None):
    return as_strided_scatter.call(
        x, src, size=tuple(size), stride=tuple(stride), storage_offset=storage_offset or 0
    )  # fmt: skip


def _flatten(op: Any, x: Any) -> Any:
    return op.reshape(x, (numel_of(op.shape(x)),))


def _draw_strided(draw: Any, s: Any) -> tuple[Any, dict[str, Any]]:
    """Draw a tensor, and attributes of a view without elements that share memory."""
    size = tuple(draw(s.integers(1, 3)) for _ in range(draw(s.integers(0, 3))))
    stride, needed = [], draw(s.integers(1, 2))
    for n in size:
        stride.append(needed)
        needed *= n
    storage_offset = draw(s.integers(0, 3))
    x = s.tensor(shape=(2, math.ceil((storage_offset + needed + 1) / 2)), dtype=MOVABLE_DTYPES)
    return draw(x), {"size": size, "stride": tuple(stride), "storage_offset": storage_offset}
