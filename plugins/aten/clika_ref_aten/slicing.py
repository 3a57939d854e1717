"""Operators that read or write a slice or one index of a dim."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.size_arithmetic import (
    MOVABLE_DTYPES,
    OPEN_END,
    is_nonnegative,
    make_index_range,
    replace_dim,
    same_type,
    slice_length,
)

aten = torch.ops.aten


@operator(aten.slice.Tensor, aten.slice_copy.Tensor, quant=SHARED_QPARAMS, error=EXACT)
def slice_(x: Tensor, *, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """Elements ``start, start + step, ...`` before ``end`` along ``dim``.

    Negative bounds count from the end; bounds out of range are clamped.
    """
    return aten.slice.Tensor(x, dim, start, end, step)


@slice_.onnx
def slice_dim(op: Any, x: Any, dim: int, *, start: Any = 0, end: Any = OPEN_END, step: Any = 1) -> Any:
    """Return ``x[start:end:step]`` along a dim, without a node if it selects the whole dim."""
    start, end = 0 if start is None else start, OPEN_END if end is None else end
    if start == 0 and end == OPEN_END and step == 1:
        return x
    steps = () if step == 1 else (op.ints([step]),)
    return op.Slice(x, op.ints([start]), op.ints([end]), op.ints([dim]), *steps)


@slice_.types
def _(x, *, dim, start, end, step):
    return replace_dim(x, dim, slice_length(x.shape[dim], start, end, step))


@slice_.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), size=(1, 6), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    return s.call(x, dim=dim, **_draw_bounds(draw, s, x.shape[dim]))


@slice_.write_back
def _(build, base, new, **attrs):
    return build(slice_scatter, base, new, types=(base.type,), **attrs)


@slice_.from_torch(aten.narrow.default, aten.narrow_copy.default)
def _(x, dim, start, length):
    if isinstance(start, int) and start < 0:
        start = x.type.shape[dim] + start
    return slice_.call(x, dim=dim, start=start, end=start + length)


def _overwrite(part: Tensor, src: Tensor) -> None:
    """Write to a part of a tensor; like torch, without broadcasting."""
    if part.shape != src.shape:
        raise ValueError(f"cannot write the shape {list(src.shape)} to a slice of the shape {list(part.shape)}")
    part.copy_(src)


@operator(aten.slice_scatter.default, quant=UNIFIED_QPARAMS, error=EXACT)
def slice_scatter(
    x: Tensor, src: Tensor, *, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """``x`` with its slice ``[start:end:step]`` along ``dim`` replaced by ``src``."""
    written = x.clone()  # torch.slice_scatter has no gradient for complex numbers
    _overwrite(aten.slice.Tensor(written, dim, start, end, step), src)
    return written


slice_scatter.types(same_type)


@slice_scatter.onnx
def overwrite_slice(op: Any, x: Any, src: Any, dim: int, *, start: Any, end: Any, step: Any = 1) -> Any:
    """Return ``x`` with its slice ``[start:end:step]`` along ``dim`` replaced by ``src``.

    If the slice is contiguous, ``src`` is concatenated with the parts before and after it, without any indices.
    """
    dim %= op.rank(x)
    size = op.shape(x)[dim]
    src = op.cast(src, op.dtype(x))
    start, end = 0 if start is None else start, OPEN_END if end is None else end
    if all(isinstance(n, int) for n in (size, start, end, step)):
        start, end, step = builtins.slice(start, end, step).indices(size)
        end = OPEN_END if end == size else max(start, end)
    if step == 1 and _is_contiguous(start, end):
        before = [] if start == 0 else [slice_dim(op, x, dim, end=start)]
        after = [] if end == OPEN_END else [slice_dim(op, x, dim, start=end)]
        return op.Concat(*before, src, *after, axis=dim) if before or after else src
    indices = slice_dim(op, make_index_range(op, size), 0, start=start, end=end, step=step)
    trailing = op.rank(x) - dim - 1
    indices = op.Unsqueeze(indices, op.ints(range(1, 1 + trailing))) if trailing else indices
    return op.ScatterElements(x, op.Expand(indices, op.Shape(src)), src, axis=dim)


@slice_scatter.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), size=(1, 7), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    bounds = _draw_bounds(draw, s, x.shape[dim])
    shape = replace_dim(TensorType(x.dtype, x.shape), dim, slice_length(x.shape[dim], **bounds)).shape
    return s.call(x, draw(s.tensor(shape=shape, dtype=x.dtype)), dim=dim, **bounds)


def _draw_bounds(draw: Any, s: Any, size: int) -> dict[str, Any]:
    """Draw slice bounds for a dim of size ``size``; the end "last" depends on it, as in ``x[:n - 1]``."""
    start = draw(s.choice(None, 0, 1, -1, -2, -4, 9, -size - 1))
    end = draw(s.choice(None, OPEN_END, 3, 1, -1, -3, 20, "last", "last"))
    return {"start": start, "end": size - 1 if end == "last" else end, "step": draw(s.choice(1, 1, 2, 3))}


@operator(aten.select.int, aten.select_copy.int, quant=SHARED_QPARAMS, error=EXACT)
def select(x: Tensor, *, dim: int, index: int) -> Tensor:
    """The elements at one index of ``dim``, which is removed."""
    return x.select(dim, index)


@select.onnx
def _(op, x, *, dim, index):
    return op.Gather(x, op.scalar(index, torch.int64), axis=dim)


@select.types
def _(x, *, dim, index):
    size = x.shape[dim]
    if isinstance(index, int) and isinstance(size, int) and not -size <= index < size:
        raise ValueError(f"select({x}, dim={dim}, index={index}): the index is out of range")
    dim %= x.rank
    return TensorType(x.dtype, x.shape[:dim] + x.shape[dim + 1 :])


@select.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    return s.call(x, dim=dim, index=draw(s.integers(-x.shape[dim], x.shape[dim] - 1)))


@select.write_back
def _(build, base, new, **attrs):
    return build(select_scatter, base, new, types=(base.type,), **attrs)


@operator(aten.select_scatter.default, quant=UNIFIED_QPARAMS, error=EXACT)
def select_scatter(x: Tensor, src: Tensor, *, dim: int, index: int) -> Tensor:
    """``x`` with the elements at one index of ``dim`` replaced by ``src``."""
    written = x.clone()  # torch.select_scatter has no gradient for complex numbers
    _overwrite(written.select(dim, index), src)
    return written


select_scatter.types(same_type)


@select_scatter.onnx
def _(op, x, src, *, dim, index):
    dim %= op.rank(x)
    row = op.Unsqueeze(op.cast(src, op.dtype(x)), op.ints([dim]))
    return overwrite_slice(op, x, row, dim, start=index, end=OPEN_END if index == -1 else index + 1)


@select_scatter.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=MOVABLE_DTYPES))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    shape = [n for i, n in enumerate(x.shape) if i != dim % x.rank]
    src = draw(s.tensor(shape=shape, dtype=x.dtype))
    return s.call(x, src, dim=dim, index=draw(s.integers(-x.shape[dim], x.shape[dim] - 1)))


@operator(aten.unbind.int, aten.unbind_copy.int, quant=SHARED_QPARAMS, error=EXACT)
def unbind(x: Tensor, *, dim: int = 0) -> tuple[Tensor, ...]:
    """One result per index of ``dim``, which is removed."""
    return x.unbind(dim)


@unbind.onnx
def _(op, x, *, dim):
    return tuple(op.Gather(x, op.scalar(i, torch.int64), axis=dim) for i in range(len(op.results)))


@unbind.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=MOVABLE_DTYPES))
    return s.call(x, dim=draw(s.integers(-x.rank, x.rank - 1)))


@unbind.write_back
def _(build, base, new, *, dim, index=None):
    if index is None:
        (index,) = range(base.type.shape[dim])  # omitted if there is only one result
    return build(select_scatter, base, new, types=(base.type,), dim=dim, index=index)


def _is_contiguous(start: Any, end: Any) -> bool:
    """Return whether ``x[:start]`` and ``x[end:]`` are the parts outside the slice for all symbol values."""
    if isinstance(start, int) and isinstance(end, int):
        return start == 0 or end == OPEN_END or ((start < 0) == (end < 0) and start <= end)
    return start == 0 or end == OPEN_END or (is_nonnegative(start) and is_nonnegative(end - start))
