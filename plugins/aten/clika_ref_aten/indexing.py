"""Operators that read elements at computed indices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import PassError, TargetError
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import torch_sympy

aten = torch.ops.aten

MASK_DTYPES = (torch.bool, torch.uint8)
"""Dtypes of index tensors that are masks."""


def reject_data_dependent_size(*operands, **attrs):
    """Type rule of operators with a data-dependent result size.

    Raises:
        PassError: always; the caller must give the types of such a node.
    """
    raise PassError("the size of the result depends on the data. Give the types of the node.")


# Shared by `index` and `index_put`


def broadcast_shape(*shapes):
    """Return the broadcast shape.

    Raises:
        PassError: two dims may differ.
    """
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if result[i] == 1:
                result[i] = size
            elif size not in (1, result[i]):
                raise PassError(f"dims of the sizes {result[i]} and {size} do not broadcast")
    return tuple(result)


def is_mask(dtype):
    """Return whether an index of this dtype is a mask."""
    return dtype in MASK_DTYPES


def index_entries(op, indices):
    """Return one entry per indexed dim: None or integer indices; a mask of rank ``r`` gives ``r`` entries."""
    result = []
    for index in indices:
        if index is None:
            result.append(None)
        elif not is_mask(op.dtype(index)):
            result.append(op.cast(index, torch.int64))
        elif op.rank(index) == 0:
            raise TargetError("a 0-d mask as an index adds a dim of size 0 or 1. Use torch.where or a 1-d mask")
        else:
            rows = op.NonZero(op.cast(index, torch.bool))
            result += [op.Gather(rows, op.constant(r, torch.int64), axis=0) for r in range(op.rank(index))]
    return result


class MergedDims(NamedTuple):
    """A tensor with its indexed dims merged into one: ``x[before, n, after]``, and indices along ``n``.

    ``order`` is the permutation that made the indexed dims adjacent, None if they already were.
    """

    x: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    position: Any
    order: list[int] | None


def merge_indexed_dims(op, x, found):
    """Merge the indexed dims of ``x`` into one; dims that are not adjacent move to the front, as in ATen."""
    shape = op.shape(x)
    dims = [d for d, e in enumerate(found) if e is not None]
    order = None
    if dims[-1] - dims[0] >= len(dims):
        order = [*dims, *(d for d in range(len(shape)) if d not in dims)]
        x, shape = op.Transpose(x, perm=order), tuple(shape[d] for d in order)
    start = 0 if order else dims[0]
    before, inside, after = shape[:start], shape[start : start + len(dims)], shape[start + len(dims) :]
    if len(dims) > 1:
        x = op.reshape(x, (*before, math.prod(inside), *after))
    return MergedDims(x, before, after, _flat_index(op, inside, [e for e in found if e is not None]), order)


def _flat_index(op, sizes, found):
    """Return the index into the merged dims; Mod wraps negative entries, but the first may stay negative."""
    total = found[0]
    for size, entry in zip(sizes[1:], found[1:], strict=True):
        # A dim of size 0 has no valid indices, but runtimes reject Mod by 0.
        length = op.scalar(torch_sympy.Max(size, 1) if is_symbolic(size) else size or 1, torch.int64)
        total = op.Add(op.Mul(total, length), op.Mod(entry, length))
    return total


def find_only_mask(op, indices):
    """Return the dim of the mask if a mask is the only index, else None."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) == 1 and is_mask(op.dtype(given[0][1])) and op.rank(given[0][1]):
        return given[0][0]
    return None


def describe_indices(s, length, *, dtype: Any = torch.int64, negative=False, **description):
    """Describe a tensor of valid indices along a dim; ``negative`` allows negative indices too."""
    legal = (-length if negative else 0, length - 1)
    return s.tensor(dtype=dtype, low=legal[0], high=legal[1], domain=legal, **description)


# Operators


@operator(aten.index.Tensor, quant=SHARED_QPARAMS, error=EXACT)
def index(x: Tensor, *indices: Tensor | None) -> Tensor:
    """``x[i, j, ...]``: indices broadcast together, None keeps a whole dim, a mask selects where it is True."""
    return aten.index.Tensor(x, list(indices))


@index.types
def _(x, *indices):
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(is_mask(i.dtype) for _, i in given):
        reject_data_dependent_size()
    dims = [d for d, _ in given]
    shape = broadcast_shape(*(i.shape for _, i in given))
    kept = [size for d, size in enumerate(x.shape) if d not in dims]
    start = dims[0] if dims[-1] - dims[0] < len(dims) else 0
    return TensorType(x.dtype, (*kept[:start], *shape, *kept[start:]))


@index.onnx
def _(op, x, *indices):
    at = find_only_mask(op, indices)
    if at is None:
        merged = merge_indexed_dims(op, x, index_entries(op, indices))
        return op.Gather(merged.x, merged.position, axis=len(merged.before))
    mask, shape = indices[at], op.shape(x)
    rank = op.rank(mask)
    if rank > 1:
        x = op.reshape(x, (*shape[:at], math.prod(shape[at : at + rank]), *shape[at + rank :]))
        mask = op.Reshape(mask, op.ints([-1]))
    return op.Compress(x, op.cast(mask, torch.bool), axis=at)


@index.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=(torch.float32, torch.int64, torch.bool)))
    return s.call(x, *draw_indices(draw, s, x))


def draw_indices(draw, s, x):
    """Draw one mask, or indices for some dims that broadcast together."""
    rank = x.rank
    if draw(s.choice(False, False, True)):
        at = draw(s.integers(0, rank - 1))
        covered = draw(s.integers(1, rank - at))
        mask = draw(s.tensor(shape=x.shape[at : at + covered], dtype=torch.bool))
        free = rank - at - covered
        if free and draw(s.booleans()):
            position = draw(describe_indices(s, x.shape[at + covered], shape=(), dtype=torch.int64, negative=True))
            return (*[None] * at, mask, position)
        return (*[None] * at, mask)
    common = tuple(draw(s.integers(1, 3)) for _ in range(draw(s.choice(1, 2, 0))))
    dims = [d for d in range(rank) if draw(s.booleans())] or [rank - 1]
    indices = [None] * (dims[-1] + 1)
    for d in dims:
        shape = tuple(1 if draw(s.choice(False, False, True)) else size for size in common)[draw(s.choice(0, 0, 1)) :]
        dtype = draw(s.choice(torch.int64, torch.int32))
        indices[d] = draw(describe_indices(s, x.shape[d], shape=shape, dtype=dtype, negative=True))
    return tuple(indices)


@operator(aten.index_select.default, quant=SHARED_QPARAMS, error=EXACT)
def index_select(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """Take the slices ``index[n]`` along ``dim``; a 0-d ``index`` takes one."""
    return torch.index_select(x, dim, index)


@index_select.onnx
def _(op, x, index, *, dim):
    if op.rank(x) == 0:
        return op.Identity(x)
    if op.rank(index) == 0:
        index = op.reshape(index, (1,))
    return op.Gather(x, index, axis=dim)


@index_select.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), dtype=(torch.float32, torch.int64)))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    shape = (draw(s.integers(1, 4)),) if draw(s.integers(0, 3)) else ()
    return s.call(x, draw(describe_indices(s, x.shape[dim], shape=shape, dtype=(torch.int64, torch.int32))), dim=dim)


def expand_to(op, x, shape):
    """Expand ``x`` to a shape, without a node if it has that shape."""
    return x if op.shape(x) == tuple(shape) else op.Expand(x, op.ints(shape))


def match_rank(op, x, result):
    """Reshape a result to 0-d if ``x`` is 0-d; see `as_vector`."""
    return result if op.rank(x) else op.reshape(result, ())


def as_vector(op, x):
    """Return a 0-d tensor as a vector of one element, others unchanged: ATen mixes the two in gather and scatter."""
    return x if op.rank(x) else op.declare(op.reshape(x, (1,)), TensorType(op.dtype(x), (1,)))


@operator(aten.gather.default, quant=SHARED_QPARAMS, error=EXACT)
def gather(x: Tensor, index: Tensor, *, dim: int, sparse_grad: bool = False) -> Tensor:
    """``y[i, j, ...] = x[index[i, j, ...], j, ...]`` for ``dim`` 0, and so on for the others."""
    return torch.gather(x, dim, index, sparse_grad=sparse_grad)


@gather.onnx
def _(op, x, index, *, dim, sparse_grad):
    return match_rank(op, index, op.GatherElements(as_vector(op, x), as_vector(op, index), axis=dim))


def draw_positions(draw, s, x, *, unique=False):
    """Draw a dim and indices along it, in a tensor that is no larger than ``x`` in the other dims."""
    if x.rank == 0:
        return draw(s.choice(0, -1)), draw(describe_indices(s, 1, shape=()))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    shape = [draw(s.integers(1, size)) for size in x.shape]
    shape[dim] = 1 if unique else draw(s.integers(1, 6))
    return dim, draw(describe_indices(s, x.shape[dim], shape=shape))


@gather.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.bool)))
    if x.rank == 0:
        return s.call(x, draw(describe_indices(s, 1, shape=())), dim=draw(s.choice(0, -1)))
    dim, index = draw_positions(draw, s, x)
    return s.call(x, index, dim=dim, sparse_grad=draw(s.booleans()))


@operator(aten.take.default, quant=SHARED_QPARAMS, error=EXACT)
def take(x: Tensor, index: Tensor) -> Tensor:
    """``x.flatten()[index]``, in the shape of ``index``."""
    return torch.take(x, index)


@take.types
def _(x, index):
    return TensorType(x.dtype, index.shape)


@take.onnx
def _(op, x, index):
    return op.Gather(op.Reshape(x, op.ints([-1])), index, axis=0)


@take.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64)))
    count = math.prod(x.shape)
    return s.call(x, draw(describe_indices(s, count, rank=(0, 3), negative=True)))


@operator(aten.take_along_dim.default, quant=SHARED_QPARAMS, error=EXACT)
def take_along_dim(x: Tensor, indices: Tensor, *, dim: int | None = None) -> Tensor:
    """`gather` after broadcasting ``x`` and ``indices`` on the other dims; of both flattened if ``dim`` is None.

    Along a ``dim``, indices are taken modulo its size; negative ones count from the end.
    """
    return torch.take_along_dim(x, indices, dim)


@take_along_dim.types
def _(x, indices, *, dim):
    if dim is None:
        return TensorType(x.dtype, (math.prod(indices.shape),))
    axis = dim % x.rank
    shape = list(broadcast_shape(_set_axis_to_one(x.shape, axis), _set_axis_to_one(indices.shape, axis)))
    shape[axis] = indices.shape[axis]
    return TensorType(x.dtype, tuple(shape))


def _set_axis_to_one(shape, axis):
    return tuple(1 if d == axis else size for d, size in enumerate(shape))


@take_along_dim.onnx
def _(op, x, indices, *, dim):
    if dim is None:
        return op.Gather(op.Reshape(x, op.ints([-1])), op.Reshape(indices, op.ints([-1])), axis=0)
    axis = dim % op.rank(x)
    length = op.scalar(op.shape(x)[axis], op.dtype(indices))
    if op.sizes.may_be_zero(op.shape(x)[axis]):  # an empty dim has no indices
        length = op.Max(length, op.scalar(1, op.dtype(indices)))
    target = list(op.result.shape)
    source = [*target[:axis], op.shape(x)[axis], *target[axis + 1 :]]
    return op.GatherElements(expand_to(op, x, source), op.Mod(expand_to(op, indices, target), length), axis=axis)


@take_along_dim.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 3)))
    if draw(s.integers(0, 3)) == 0:
        return s.call(x, draw(describe_indices(s, math.prod(x.shape))), dim=None)
    dim = draw(s.integers(-x.rank, x.rank - 1))
    shape = [size if draw(s.booleans()) else 1 for size in x.shape]
    shape[dim] = draw(s.integers(1, 4)) if x.shape[dim] else 0
    bounds = -2 * x.shape[dim], max(2 * x.shape[dim] - 1, 0)
    return s.call(
        x, draw(s.tensor(dtype=torch.int64, low=bounds[0], high=bounds[1], domain=bounds, shape=shape)), dim=dim
    )
