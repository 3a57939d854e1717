"""Operators that write elements at computed indices; each returns a new tensor.

Repeated indices are combined by ScatterElements, never by ScatterND: in ONNX Runtime its reductions lose updates when
several threads update one element (measured: 25 % of 2 million additions, version 1.31).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import COMPOSE, DOT, EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import KEEP_FLOAT, UNIFIED_QPARAMS
from clika_ref_aten.elementwise import HALF_DTYPES, choose
from clika_ref_aten.indexing import (
    MergedDims,
    as_vector,
    broadcast_shape,
    describe_indices,
    draw_indices,
    draw_positions,
    expand_to,
    find_only_mask,
    index_entries,
    is_mask,
    match_rank,
    merge_indexed_dims,
)
from clika_ref_aten.size_arithmetic import same_type

aten = torch.ops.aten

ONNX_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""ONNX names of ATen's reductions; a mean is a sum that is divided afterwards."""


def _as_tensor(value, like):
    """Return a scalar as a tensor with the dtype and device of ``like``."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)


def _scatter_elements(op, x, index, updates, *, axis, reduction=None):
    """Add a ScatterElements node; ONNX Runtime cannot reduce FP16 and BF16, so they are computed in float32."""
    dtype = op.dtype(x)
    via = torch.float32 if reduction and dtype in HALF_DTYPES else dtype
    via = torch.int32 if reduction in ("max", "min") and dtype == torch.bool else via
    x, updates = op.cast(x, via), op.cast(updates, via)
    return op.cast(op.ScatterElements(x, index, updates, axis=axis, reduction=reduction), dtype)


# index_put


@operator(quant=KEEP_FLOAT, error=DOT)
def index_put(x: Tensor, values: Tensor | Number, *indices: Tensor | None, accumulate: bool = False) -> Tensor:
    """Set ``x[i, j, ...]`` to ``values``, or add them there, with indices as in `index`.

    A 0-d ``x`` counts as a vector of one element, unless the index is a mask.
    """
    whole = x.reshape(1) if x.dim() == 0 and not is_mask(_first_dtype(indices)) else x
    return aten.index_put(whole, list(indices), _as_tensor(values, x), accumulate).reshape(x.shape)


def _first_dtype(indices):
    return next(i.dtype for i in indices if i is not None)


index_put.types(same_type)


@index_put.from_torch(aten.index_put.default, aten._index_put_impl.default)  # noqa: SLF001 - ATen's name
def _(x, indices, values, accumulate=False, unsafe=False):
    return index_put.call(x, values, *indices, accumulate=accumulate)


@index_put.from_torch(aten.index_copy.default)
def _(x, dim, index, source):
    return index_put.call(x, source, *[None] * (dim % max(x.type.rank, 1)), index)


@index_put.from_torch(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _(x, dim, index, value):
    return index_put.call(x, value, *[None] * (dim % max(x.type.rank, 1)), index)


@index_put.onnx
def _(op, x, values, *indices, accumulate):
    if 0 in op.shape(x):  # nothing to write to, whatever the indices
        return op.Identity(x)
    if op.rank(x) == 0 and not is_mask(op.dtype(next(i for i in indices if i is not None))):
        written = _put_elements(op, as_vector(op, x), values, indices, accumulate=accumulate)
        return match_rank(op, x, written)
    return _put_elements(op, x, values, indices, accumulate=accumulate)


def _put_elements(op, x, values, indices, *, accumulate):
    (values,) = op.promote(values)
    at = find_only_mask(op, indices)
    if at is not None and (chosen := _broadcast_masked_values(op, x, values, indices[at], at)) is not None:
        mask, values = chosen
        return choose(op, mask, op.Add(x, values) if accumulate else values, x)
    merged = merge_indexed_dims(op, x, index_entries(op, indices))
    values = _align_values(op, values, indices, merged)
    if merged.before or accumulate:
        given = [i for i in indices if i is not None]
        single = any(is_mask(op.dtype(i)) for i in given)  # the indices of a mask are a vector
        at = None if single else broadcast_shape(*map(op.shape, given))
        result = _write_elements(op, merged, values, at, accumulate=accumulate)
    else:
        result = op.ScatterND(merged.x, op.Unsqueeze(merged.position, op.ints([-1])), values)
    return _restore_shape(op, x, result, merged)


def _broadcast_masked_values(op, x, values, mask, at):
    """Return the mask and values reshaped to broadcast with ``x``; None if each masked element has its own value."""
    covered, shape = op.rank(mask), op.shape(values)
    after = op.rank(x) - at - covered
    if len(shape) > after and shape[-after - 1] != 1:
        return None
    if len(shape) > after and covered > 1:
        cut = len(shape) - after
        values = op.reshape(values, (*shape[: cut - 1], *[1] * covered, *shape[cut:]))
    mask = op.cast(mask, torch.bool)
    return (op.Unsqueeze(mask, op.ints(range(-after, 0))) if after else mask), values


def _align_values(op, values, indices, merged):
    """Broadcast the values to ``[before, positions, after]``."""
    before, after = merged.before, merged.after
    if any(i is not None and is_mask(op.dtype(i)) for i in indices):
        parts = [op.ints(before)] * bool(before) + [op.Shape(merged.position)] + [op.ints(after)] * bool(after)
        return op.Expand(values, op.Concat(*parts, axis=0))
    target = (*before, *broadcast_shape(*(op.shape(i) for i in indices if i is not None)), *after)
    return expand_to(op, values, target)


def _write_elements(op, merged, values, at, *, accumulate):
    """Write ``values[before, positions, after]`` into ``x[before, n, after]``.

    ``at`` is the shape of the positions, or None for a vector of unknown length.
    """
    before, after = merged.before, merged.after
    if at is not None and len(at) != 1:
        values = op.reshape(values, (*before, math.prod(at), *after))
    column = op.Reshape(merged.position, op.ints((-1, *[1] * len(after))))
    index = op.Expand(column, op.Shape(values)) if before or after else column
    reduction = "add" if accumulate else None
    return _scatter_elements(op, merged.x, index, values, axis=len(before), reduction=reduction)


def _restore_shape(op, x, result, merged):
    """Restore the shape that ``x`` had before `merge_indexed_dims`."""
    shape, order = op.shape(x), merged.order
    if order is None:
        is_vector = len(merged.before) + 1 + len(merged.after) == len(shape)
        return result if is_vector else op.reshape(result, shape)
    inverse = [order.index(d) for d in range(len(order))]
    return op.Transpose(op.reshape(result, [shape[d] for d in order]), perm=inverse)


@index_put.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), size=(2, 5), dtype=(torch.float32, torch.int64), low=-9, high=9))
    if draw(s.choice(False, False, True)):
        at = draw(s.integers(0, x.rank - 1))
        mask = draw(s.tensor(shape=x.shape[at : at + draw(s.integers(1, x.rank - at))], dtype=torch.bool))
        after = x.shape[at + mask.rank :]
        shape = draw(s.choice((), after, (1, *after), (*x.shape[:at], 1, *after)))
        values = draw(s.choice(2, draw(s.tensor(shape=shape, dtype=x.dtype))))
        return s.call(x, values, *[None] * at, mask, accumulate=draw(s.booleans()))
    accumulate = draw(s.booleans())
    if accumulate:
        return s.call(x, draw(s.tensor(shape=(), dtype=x.dtype)), *draw_indices(draw, s, x), accumulate=True)
    dims = [d for d in range(x.rank) if draw(s.booleans())] or [x.rank - 1]
    indices = [None] * (dims[-1] + 1)
    count = draw(s.integers(1, min(x.shape[d] for d in dims)))
    for d in dims:
        # Duplicate writes have no defined order: all indices differ, and some are negative.
        back = draw(s.choice(0, x.shape[d]))
        span = {"low": -back, "high": count - 1 - back, "domain": (-x.shape[d], x.shape[d] - 1)}
        indices[d] = draw(s.tensor(shape=(count,), dtype=torch.int64, unique=True, **span))
    is_adjacent = dims[-1] - dims[0] < len(dims)
    kept = [size for d, size in enumerate(x.shape) if d not in dims]
    at = dims[0] if is_adjacent else 0
    values = draw(s.tensor(shape=(*kept[:at], count, *kept[at:]), dtype=x.dtype))
    return s.call(x, values, *indices, accumulate=False)


# One dim


@operator(aten.index_add.default, quant=KEEP_FLOAT, error=DOT)
def index_add(x: Tensor, index: Tensor, source: Tensor, *, dim: int, alpha: Number = 1) -> Tensor:
    """Add ``alpha * source`` to the slices ``index[n]`` of ``x`` along ``dim``.

    Raises:
        ValueError: ``alpha`` is a float but ``x`` is not; some PyTorch kernels truncate it, others do not.
    """
    if isinstance(alpha, float) and not x.is_floating_point():
        raise ValueError(f"index_add of {x.dtype} does not support the alpha {alpha}. Give an integer.")
    return torch.index_add(x, dim, index, source, alpha=alpha)


@index_add.onnx
def _(op, x, index, source, *, dim, alpha):
    if 0 in op.shape(x):
        return op.Identity(x)
    source = as_vector(op, source)
    if alpha != 1:
        source = op.Mul(source, op.like(source, alpha))
    axis, shape = dim % max(op.rank(x), 1), op.shape(x)
    position = op.cast(index, torch.int64)
    merged = MergedDims(as_vector(op, x), shape[:axis], shape[axis + 1 :], position, None)
    result = _write_elements(op, merged, source, op.shape(index), accumulate=True)
    return match_rank(op, x, result)


@index_add.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=(torch.float32, torch.int64)))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    shape = list(x.shape)
    shape[dim] = draw(s.integers(1, 6))
    index = draw(describe_indices(s, x.shape[dim], shape=(shape[dim],), dtype=(torch.int64, torch.int32)))
    alpha = draw(s.choice(1, 2, -3))
    return s.call(x, index, draw(s.tensor(shape=shape, dtype=x.dtype)), dim=dim, alpha=alpha)


@operator(aten.scatter.src, aten.scatter.value, quant=KEEP_FLOAT, error=EXACT)
def scatter(x: Tensor, index: Tensor, src: Tensor | Number, *, dim: int) -> Tensor:
    """``x[index[i, j, ...], j, ...] = src[i, j, ...]`` for ``dim`` 0, and so on for the others."""
    return torch.scatter(x, dim, index, src)


scatter.types(same_type)


def _updates(op, index, src):
    """Return the updates in the shape of ``index``; ATen ignores the rest of ``src``."""
    (src,) = op.promote(src)
    index_shape, given = op.shape(index) or (1,), op.shape(src)
    if not given:
        return op.Expand(src, op.ints(index_shape))
    if given == index_shape:
        return src
    return op.Slice(src, op.ints([0] * len(index_shape)), op.ints(index_shape))


@scatter.onnx
def _(op, x, index, src, *, dim):
    written = _scatter_elements(op, as_vector(op, x), as_vector(op, index), _updates(op, index, src), axis=dim)
    return match_rank(op, x, written)


@scatter.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.bool), low=0))
    dim, index = draw_positions(draw, s, x, unique=True)
    larger = tuple(size + draw(s.integers(0, 2)) for size in index.shape)
    return s.call(x, index, draw(s.choice(1, draw(s.tensor(shape=larger, dtype=x.dtype)))), dim=dim)


@operator(aten.scatter_reduce.two, quant=KEEP_FLOAT, error=COMPOSE)
def scatter_reduce(
    x: Tensor, index: Tensor, src: Tensor | Number, *, dim: int, reduce: str, include_self: bool = True
) -> Tensor:
    """Like `scatter`, but reduce all values at one index by ``reduce``: sum, prod, mean, amax or amin.

    ``include_self`` includes the element of ``x``.
    """
    src = _as_tensor(src, x)
    src = src if src.ndim or not index.ndim else src.expand(index.shape)
    return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)


scatter_reduce.types(same_type)


@scatter_reduce.from_torch(aten.scatter_add.default)
def _(x, dim, index, src):
    return scatter_reduce.call(x, index, src, dim=dim, reduce="sum")


@scatter_reduce.from_torch(aten.scatter.reduce, aten.scatter.value_reduce)
def _(x, dim, index, src=None, value=None, *, reduce):
    name = {"add": "sum", "multiply": "prod"}[reduce]
    return scatter_reduce.call(x, index, value if src is None else src, dim=dim, reduce=name)


@scatter_reduce.onnx
def _(op, x, index, src, *, dim, reduce, include_self):
    whole, index, updates = as_vector(op, x), as_vector(op, index), _updates(op, index, src)
    if not include_self:
        neutral = op.Expand(op.like(x, _neutral_element(reduce, op.dtype(x))), op.Shape(index))
        whole = op.ScatterElements(whole, index, neutral, axis=dim)
    result = _scatter_elements(op, whole, index, updates, axis=dim, reduction=ONNX_REDUCTIONS[reduce])
    if reduce == "mean":
        result = _divide_rounding_down(op, result, _count_updates(op, x, index, dim, start=int(include_self)))
    return match_rank(op, x, result)


def _neutral_element(reduce, dtype):
    """Return the neutral element of a reduction."""
    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    if dtype == torch.bool:
        return reduce == "amin"
    largest = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
    smallest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    return smallest if reduce == "amax" else largest


def _count_updates(op, x, index, dim, *, start):
    """Return the number of elements in each mean, at least 1."""
    ones = op.Expand(op.like(x, 1), op.Shape(index))
    counts = op.Expand(op.like(x, start), op.ints(op.shape(x) or (1,)))
    counts = _scatter_elements(op, counts, index, ones, axis=dim, reduction="add")
    return counts if start else op.Max(counts, op.like(x, 1))


def _divide_rounding_down(op, total, count):
    """Divide, rounding integers down as eager does."""
    quotient = op.Div(total, count)
    if op.dtype(total).is_floating_point:
        return quotient
    rest = op.Sub(total, op.Mul(quotient, count))  # ONNX truncates the quotient
    return op.Sub(quotient, op.cast(op.Less(rest, op.like(rest, 0)), op.dtype(total)))


@scatter_reduce.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64), low=-5, high=5))
    dim, index = draw_positions(draw, s, x)
    src = draw(s.tensor(shape=index.shape, dtype=x.dtype))
    reduce = draw(s.choice("sum", "prod", "mean", "amax", "amin"))
    return s.call(x, index, src, dim=dim, reduce=reduce, include_self=draw(s.booleans()))


@operator(aten.masked_scatter.default, quant=UNIFIED_QPARAMS, error=EXACT)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Write the elements of ``source`` in order where ``mask`` is True; ``x`` and ``mask`` broadcast."""
    return torch.masked_scatter(x, mask, source)


@masked_scatter.types
def _(x, mask, source):
    return type(x)(x.dtype, broadcast_shape(x.shape, mask.shape))


@masked_scatter.onnx
def _(op, x, mask, source):
    shape = op.result.shape
    x, mask = (expand_to(op, v, shape) for v in (x, mask))
    if not shape:
        x, mask = op.reshape(x, (1,)), op.reshape(mask, (1,))
    where = op.Transpose(op.NonZero(mask), perm=[1, 0])
    count = op.Shape(where, start=0, end=1)
    values = op.Slice(op.Reshape(source, op.ints([-1])), op.ints([0]), count)
    result = op.ScatterND(x, where, values)
    return result if shape else op.reshape(result, ())


@masked_scatter.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64)))
    mask = draw(s.tensor(shape=[size if draw(s.booleans()) else 1 for size in x.shape], dtype=torch.bool))
    source = draw(s.tensor(shape=(math.prod(x.shape) + draw(s.integers(0, 2)),), dtype=x.dtype))
    return s.call(x, mask, source)
