"""Operators that read, write and create diagonals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import Dim, TensorType
from clika_ref_aten.size_arithmetic import (
    MOVABLE_DTYPES,
    clamp_to_zero,
    make_index_range,
    make_strided_indices,
    min_size,
    normalize_size,
    numel_of,
    same_type,
)
from clika_ref_aten.slicing import slice_dim

aten = torch.ops.aten

DTYPES_WITHOUT_WHERE = (torch.bool, torch.int16, torch.int8)
"""Dtypes without a Where kernel in ONNX Runtime on the CPU."""


@operator(
    aten.diagonal.default,
    aten.diagonal_copy.default,
    aten.linalg_diagonal.default,
    quant=SHARED_QPARAMS,
    error=EXACT,
)
def diagonal(x: Tensor, *, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """``x[..., i, i + offset]`` in the plane of ``dim1`` and ``dim2``; the diagonal becomes the last dim."""
    return x.diagonal(offset, dim1, dim2)


@diagonal.onnx
def _(op, x, *, offset, dim1, dim2):
    return _read_diagonal(op, x, offset, (dim1, dim2))


@diagonal.types
def _(x, *, offset, dim1, dim2):
    return _diagonal_type(x, offset, (dim1, dim2))


@diagonal.samples
def _(draw, s):
    x, attrs = _draw_plane(draw, s)
    return s.call(x, **attrs)


@diagonal.write_back
def _(build, base, new, **attrs):
    return build(diagonal_scatter, base, new, types=(base.type,), **attrs)


@operator(aten.diagonal_scatter.default, quant=UNIFIED_QPARAMS, error=EXACT)
def diagonal_scatter(x: Tensor, src: Tensor, *, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """``x`` with a diagonal in the plane of ``dim1`` and ``dim2`` replaced by the last dim of ``src``."""
    return torch.diagonal_scatter(x, src, offset, dim1, dim2)


diagonal_scatter.types(same_type)


@diagonal_scatter.onnx
def _(op, x, src, *, offset, dim1, dim2):
    shape, order = op.shape(x), _move_plane_last(op.rank(x), (dim1, dim2))
    length = _diagonal_length(shape[dim1], shape[dim2], offset)
    first, step = _diagonal_start_and_step(offset, shape[dim2])
    indices = op.Expand(make_strided_indices(op, (length,), (step,), first), op.Shape(src))
    flat = _flatten_plane(op, x, order)
    written = op.ScatterElements(flat, indices, op.cast(src, op.dtype(x)), axis=len(shape) - 2)
    planes = op.reshape(written, tuple(shape[d] for d in order))
    back = [order.index(i) for i in range(len(order))]
    return planes if back == order == sorted(order) else op.Transpose(planes, perm=back)


@diagonal_scatter.samples
def _(draw, s):
    x, attrs = _draw_plane(draw, s)
    shape = _diagonal_type(TensorType(x.dtype, x.shape), attrs["offset"], (attrs["dim1"], attrs["dim2"])).shape
    return s.call(x, draw(s.tensor(shape=shape, dtype=x.dtype)), **attrs)


@operator(aten.diag_embed.default, quant=SHARED_QPARAMS, error=EXACT)
def diag_embed(x: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """A tensor of zeros with the last dim of ``x`` as a diagonal in the plane of two new dims."""
    return x.diag_embed(offset, dim1, dim2)


@diag_embed.onnx
def _(op, x, *, offset, dim1, dim2):
    planes = _embed_diagonal(op, x, offset)
    order = _move_plane_last(op.rank(x) + 1, (dim1, dim2))
    back = [order.index(i) for i in range(len(order))]
    return planes if order == sorted(order) else op.Transpose(planes, perm=back)


@diag_embed.types
def _(x, *, offset, dim1, dim2):
    size = normalize_size(x.shape[-1] + abs(offset))
    order = _move_plane_last(x.rank + 1, (dim1, dim2))
    planes = (*x.shape[:-1], size, size)
    return TensorType(x.dtype, tuple(planes[order.index(i)] for i in range(len(order))))


@diag_embed.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 3), dtype=MOVABLE_DTYPES))
    dim1, dim2 = draw(s.choice((-2, -1), (0, 1), (-1, 0), (0, -1)))
    return s.call(x, offset=draw(s.integers(-2, 2)), dim1=dim1, dim2=dim2)


@operator(aten.diag.default, quant=SHARED_QPARAMS, error=EXACT)
def diag(x: Tensor, *, diagonal: int = 0) -> Tensor:
    """A diagonal of the matrix ``x[n, m]``, or a matrix of zeros with the vector ``x[n]`` as a diagonal."""
    return x.diag(diagonal)


@diag.onnx
def _(op, x, *, diagonal):
    return _embed_diagonal(op, x, diagonal) if op.rank(x) == 1 else _read_diagonal(op, x, diagonal, (0, 1))


@diag.types
def _(x, *, diagonal):
    if x.rank == 1:
        return TensorType(x.dtype, (normalize_size(x.shape[0] + abs(diagonal)),) * 2)
    return _diagonal_type(x, diagonal, (0, 1))


@diag.samples
def _(draw, s):
    return s.call(draw(s.tensor(rank=(1, 2), dtype=MOVABLE_DTYPES)), diagonal=draw(s.integers(-2, 2)))


def _draw_plane(draw: Any, s: Any) -> tuple[Any, dict[str, int]]:
    x = draw(s.tensor(rank=(2, 5), dtype=MOVABLE_DTYPES))
    dim1, dim2 = draw(s.choice((0, 1), (1, 0), (-2, -1), (-1, 0)))
    return x, {"offset": draw(s.integers(-2, 2)), "dim1": dim1, "dim2": dim2}


def _move_plane_last(rank: int, plane: tuple[int, int]) -> list[int]:
    """Return the permutation of dims that puts the two dims of the plane last."""
    last = [d % rank for d in plane]
    return [*(i for i in range(rank) if i not in last), *last]


def _diagonal_length(rows: Dim, columns: Dim, offset: int) -> Dim:
    if offset < 0:
        return clamp_to_zero(min_size(normalize_size(rows + offset), columns))
    return clamp_to_zero(min_size(rows, normalize_size(columns - offset)))


def _diagonal_start_and_step(offset: int, columns: Dim) -> tuple[Dim, Dim]:
    """Return the start and the step of a diagonal in its flattened plane."""
    return offset if offset >= 0 else -offset * columns, columns + 1


def _diagonal_type(x: TensorType, offset: int, plane: tuple[int, int]) -> TensorType:
    *outer, rows, columns = (x.shape[d] for d in _move_plane_last(x.rank, plane))
    return TensorType(x.dtype, (*outer, _diagonal_length(rows, columns, offset)))


def _flatten_plane(op: Any, x: Any, order: list[int]) -> Any:
    shape = tuple(op.shape(x)[d] for d in order)
    planes = x if order == sorted(order) else op.Transpose(x, perm=order)
    return op.reshape(planes, (*shape[:-2], numel_of(shape[-2:])))


def _read_diagonal(op: Any, x: Any, offset: int, plane: tuple[int, int]) -> Any:
    first, step = _diagonal_start_and_step(offset, op.shape(x)[plane[1]])
    end = first + op.result.shape[-1] * step
    return slice_dim(
        op, _flatten_plane(op, x, _move_plane_last(op.rank(x), plane)), op.rank(x) - 2, start=first, end=end, step=step
    )


def _embed_diagonal(op: Any, x: Any, offset: int) -> Any:
    """Return matrices with the last dim of ``x`` as a diagonal.

    Below the main diagonal, the index of an element is its column, otherwise its row. So ``x`` is padded at its end
    only.
    """
    dtype, rank, size = op.dtype(x), op.rank(x), op.shape(x)[-1] + abs(offset)
    x = op.cast(x, torch.int32) if dtype in DTYPES_WITHOUT_WHERE else x
    if offset:
        x = op.Pad(x, op.ints([*[0] * (2 * rank - 1), abs(offset)]))
    spread = op.Unsqueeze(x, op.ints([rank - 1 if offset < 0 else rank]))
    columns = make_index_range(op, normalize_size(size))
    rows = op.Unsqueeze(op.Add(columns, op.scalar(offset, torch.int64)), op.ints([1]))
    return op.cast(op.Where(op.Equal(rows, columns), spread, op.like(x, 0)), dtype)
