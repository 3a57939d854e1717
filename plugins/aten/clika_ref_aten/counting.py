"""Operators that find and count elements; most results have a data-dependent size."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import DOT, EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import unary_sampler
from clika_ref_aten.indexing import as_vector, broadcast_shape, expand_to, reject_data_dependent_size
from clika_ref_aten.size_arithmetic import OPEN_END

aten = torch.ops.aten

SAMPLE_DTYPES = (torch.float32, torch.bool, torch.int64, torch.float64)


@operator(aten.nonzero.default, aten.argwhere.default, error=EXACT)
def nonzero(x: Tensor) -> Tensor:
    """Return the indices ``[n, r]`` of the nonzero elements of a tensor of rank ``r``."""
    return torch.nonzero(x)


nonzero.types(reject_data_dependent_size)
nonzero.samples(unary_sampler(rank=(0, 3), dtype=SAMPLE_DTYPES, low=-1, high=1))


@nonzero.onnx
def _(op, x):
    found = op.Transpose(_nonzero(op, x), perm=[1, 0])
    return found if op.rank(x) else op.Slice(found, op.ints([0]), op.ints([0]), op.ints([1]))


def _nonzero(op, x):
    return op.NonZero(op.cast(as_vector(op, x), torch.bool))


@operator(aten.nonzero_numpy.default, aten.where.default, error=EXACT)
def nonzero_numpy(x: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of the nonzero elements, as one vector ``[n]`` per dim."""
    return aten.nonzero_numpy(x)


nonzero_numpy.types(reject_data_dependent_size)
nonzero_numpy.samples(unary_sampler(rank=(0, 3), dtype=SAMPLE_DTYPES, low=-1, high=1))


@nonzero_numpy.onnx
def _(op, x):
    found = _nonzero(op, x)
    return tuple(op.Gather(found, op.constant(i, torch.int64), axis=0) for i in range(max(op.rank(x), 1)))


@operator(aten.masked_select.default, quant=SHARED_QPARAMS, error=EXACT)
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements of ``x`` where ``mask`` is True, as a vector; the two broadcast."""
    return torch.masked_select(x, mask)


masked_select.types(reject_data_dependent_size)


@masked_select.onnx
def _(op, x, mask):
    shape = broadcast_shape(op.shape(x), op.shape(mask))
    x, mask = (expand_to(op, v, shape) for v in (x, mask))
    return op.Compress(as_vector(op, x) if not shape else x, op.Reshape(mask, op.ints([-1])))


@masked_select.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64)))
    shape = [size if draw(s.booleans()) else 1 for size in x.shape]
    return s.call(x, draw(s.tensor(shape=draw(s.choice(x.shape, shape)), dtype=torch.bool)))


@operator(aten.one_hot.default, error=EXACT)
def one_hot(x: Tensor, *, num_classes: int = -1) -> Tensor:
    """``y[..., k] = 1 if x[...] == k else 0`` for ``num_classes`` classes (-1: one more than the largest element)."""
    return torch.nn.functional.one_hot(x, num_classes)


@one_hot.types
def _(x, *, num_classes):
    if isinstance(num_classes, int) and num_classes < 0:
        reject_data_dependent_size()
    return TensorType(torch.int64, (*x.shape, num_classes))


@one_hot.onnx
def _(op, x, *, num_classes):
    depth = op.scalar(num_classes, torch.int64)
    if isinstance(num_classes, int) and num_classes < 0:
        depth = op.Add(op.ReduceMax(x, keepdims=False), op.like(x, 1))
    hot = op.OneHot(as_vector(op, x), depth, op.constant([0, 1], torch.int64), axis=-1)
    return hot if op.rank(x) else op.Reshape(hot, op.ints([-1]))


one_hot.samples(unary_sampler(dtype=torch.int64, low=0, high=4, domain=(0, 4), attrs={"num_classes": (5, 7, -1)}))


def _scatter_add(op, positions, amounts, length):
    """Sum ``amounts[n]`` at ``positions[n]`` of a vector of the given ``length`` (int64[1])."""
    zeros = op.Expand(op.like(amounts, 0), length)
    return op.ScatterElements(zeros, positions, amounts, axis=0, reduction="add")


@operator(aten.bincount.default, error=DOT)
def bincount(x: Tensor, weights: Tensor | None = None, *, minlength: int = 0) -> Tensor:
    """Count each value in ``x[n]``, or sum its weights; the result has at least ``minlength`` elements."""
    return torch.bincount(x, weights, minlength)


bincount.types(reject_data_dependent_size)


@bincount.onnx
def _(op, x, weights, *, minlength):
    x = op.cast(x, torch.int64)
    minimum = op.Sub(op.ints([minlength]), op.ints([1]))
    length = op.Add(op.ReduceMax(op.Concat(x, minimum, axis=0), keepdims=True), op.ints([1]))
    amounts = op.Expand(op.constant(1, torch.int64), op.Shape(x)) if weights is None else weights
    (amounts,) = op.promote(amounts)
    return _scatter_add(op, x, amounts, length)


@bincount.samples
def _(draw, s):
    kinds = (torch.int64, torch.int32, torch.uint8)
    x = draw(s.tensor(shape=(draw(s.integers(0, 6)),), dtype=kinds, low=0, high=6, domain=(0, 6)))
    weights = draw(s.tensor(shape=x.shape, dtype=(torch.float32, torch.int64))) if draw(s.booleans()) else None
    return s.call(x, weights, minlength=draw(s.choice(0, 3, 9)))


@operator(aten.histc.default, error=EXACT)
def histc(x: Tensor, *, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    """Count elements in ``bins`` equal intervals of ``[min, max]``, or of the range of ``x`` if the two are equal."""
    return torch.histc(x, bins, min, max)


@histc.onnx
def _(op, x, *, bins, min, max):
    x_flat = op.Reshape(x, op.ints([-1]))
    low, high = (op.like(x, min), op.like(x, max)) if min != max else _data_range(op, x, x_flat)
    inside = op.And(op.GreaterOrEqual(x_flat, low), op.LessOrEqual(x_flat, high))
    scaled = op.Div(op.Mul(op.Sub(x_flat, low), op.like(x, bins)), op.Sub(high, low))  # rounded in eager's order
    if min == max:  # for large values, low - 1 equals high + 1: the middle bin counts all
        scaled = op.Where(op.Equal(low, high), op.like(x, bins // 2), scaled)
    last = op.like(x, bins - 1)
    bin_index = op.Where(inside, op.Min(scaled, last), op.like(x, bins))  # an extra bin for elements outside
    ones = op.Expand(op.like(x, 1), op.Shape(x_flat))
    counts = _scatter_add(op, op.cast(bin_index, torch.int64), ones, op.ints([bins + 1]))
    return op.Slice(counts, op.ints([0]), op.ints([bins]))


def _data_range(op, x, x_flat):
    """Return the smallest and the largest element; where they are equal, one less and one more."""
    low, high = op.ReduceMin(x_flat, keepdims=False), op.ReduceMax(x_flat, keepdims=False)
    around = op.Where(op.Equal(low, high), op.like(x, 1), op.like(x, 0))
    return op.Sub(low, around), op.Add(high, around)


@histc.samples
def _(draw, s):
    reach = draw(s.choice(5, 5, 3e7))
    x = draw(s.tensor(dtype=(torch.float32, torch.float64), low=-reach, high=reach))
    low, high = draw(s.choice((0, 0), (-2, 3), (0, 1.5), (-0.5, 4), (1, 1), (-2.5, -2.5)))
    return s.call(x, bins=draw(s.integers(1, 9)), min=low, max=high)


# Unique elements


def _widen_integers(op, x):
    """Return bools and small integers as int64: ONNX Runtime lacks kernels for them."""
    return op.cast(x, torch.int64) if op.dtype(x) in (torch.bool, torch.int32, torch.int16, torch.uint8) else x


def _unique(op, x, *, inverse, counts, axis=None):
    """Return the sorted unique elements, the inverse indices and the counts."""
    dtype = op.dtype(x)
    values, _, indices, amounts = op.Unique(_widen_integers(op, x), axis=axis, sorted=1, outputs=4)
    indices, amounts = op.declare(indices, torch.int64), op.declare(amounts, torch.int64)
    none = op.constant(torch.zeros(0), torch.int64)
    return op.cast(values, dtype), indices if inverse else none, amounts if counts else none


@operator(aten._unique2.default, error=EXACT)  # noqa: SLF001 - ATen's name
def unique2(
    x: Tensor,
    *,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted unique elements, and the inverse indices and counts if requested (otherwise empty tensors)."""
    return aten._unique2(x, sorted, return_inverse, return_counts)  # noqa: SLF001 - ATen's name


unique2.types(reject_data_dependent_size)


@unique2.onnx
def _(op, x, *, sorted, return_inverse, return_counts):
    values, indices, amounts = _unique(op, x, inverse=return_inverse, counts=return_counts)
    return values, op.reshape(indices, op.shape(x)) if return_inverse else indices, amounts


@unique2.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.int64, torch.bool, torch.int32), low=0))
    asked = {"return_inverse": draw(s.booleans()), "return_counts": draw(s.booleans())}
    return s.call(x, sorted=draw(s.booleans()) or math.prod(x.shape) > 1, **asked)


@operator(aten.unique_dim.default, error=EXACT)
def unique_dim(
    x: Tensor,
    *,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted unique slices along ``dim``, the inverse indices and the counts."""
    return aten.unique_dim(x, dim, sorted, return_inverse, return_counts)


unique_dim.types(reject_data_dependent_size)


@unique_dim.onnx
def _(op, x, *, dim, sorted, return_inverse, return_counts):
    return _unique(op, x, inverse=True, counts=True, axis=dim)  # eager always returns all three


@unique_dim.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 3), dtype=(torch.float32, torch.int64), low=0, high=1))
    asked = {"return_inverse": draw(s.booleans()), "return_counts": draw(s.booleans())}
    return s.call(x, dim=draw(s.integers(-x.rank, x.rank - 1)), sorted=draw(s.booleans()), **asked)


@operator(aten.unique_consecutive.default, error=EXACT)
def unique_consecutive(
    x: Tensor, *, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements that differ from those before them, or slices along ``dim``, with indices and counts."""
    return aten.unique_consecutive(x, return_inverse, return_counts, dim)


unique_consecutive.types(reject_data_dependent_size)


@unique_consecutive.onnx
def _(op, x, *, return_inverse, return_counts, dim):
    shape, dtype = op.shape(x), op.dtype(x)
    whole = _widen_integers(op, x)
    dim = None if op.rank(x) == 1 and dim == 0 else dim  # as in eager, which does not do so for -1
    axis, rows = (dim % op.rank(x), whole) if dim is not None else (0, op.Reshape(whole, op.ints([-1])))
    count = shape[axis] if dim is not None else math.prod(shape)
    is_start = op.Slice(
        _mark_starts(op, rows, axis, None if dim is None else op.rank(x)), op.ints([0]), op.ints([count])
    )
    start = op.declare(op.Squeeze(op.NonZero(is_start), op.ints([0])), torch.int64)
    values = op.cast(op.declare(op.Gather(rows, start, axis=axis), op.dtype(whole)), dtype)
    none = op.constant(torch.zeros(0), torch.int64)
    has_all = dim is not None  # as in eager
    inverse, amounts = none, none
    if return_inverse or has_all:
        number = op.CumSum(op.cast(is_start, torch.int64), op.scalar(0, torch.int64))
        inverse = op.declare(op.Sub(number, op.scalar(1, torch.int64)), torch.int64)
        inverse = inverse if has_all else op.reshape(inverse, shape)
    if return_counts or has_all:
        ends = op.Concat(op.Slice(start, op.ints([1]), op.ints([OPEN_END])), op.ints([count]), axis=0)
        amounts = op.declare(op.Sub(ends, start), torch.int64)
    return values, inverse, amounts


def _mark_starts(op, rows, axis, rank):
    """Return whether each slice along an axis differs from the one before it; one more element if there are none."""
    before = op.Slice(rows, op.ints([0]), op.ints([-1]), op.ints([axis]))
    after = op.Slice(rows, op.ints([1]), op.ints([OPEN_END]), op.ints([axis]))
    differs = op.Not(op.Equal(before, after))
    others = [d for d in range(rank or 1) if d != axis]
    if others:
        counts = op.ReduceMax(op.cast(op.declare(differs, torch.bool), torch.int32), op.ints(others), keepdims=0)
        differs = op.Greater(counts, op.scalar(0, torch.int32))
    first = op.constant(torch.ones(1), torch.bool)
    return op.declare(op.Concat(first, differs, axis=0), torch.bool)


@unique_consecutive.samples
def _(draw, s):
    x = draw(s.tensor(rank=(0, 3), dtype=(torch.float32, torch.int64, torch.bool, torch.int32), low=0, high=1))
    asked = {"return_inverse": draw(s.booleans()), "return_counts": draw(s.booleans())}
    dim = draw(s.integers(-x.rank, x.rank - 1)) if x.rank and draw(s.booleans()) else None
    return s.call(x, dim=dim, **asked)
