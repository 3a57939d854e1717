"""Adaptive pooling: window ``i`` of ``m`` along a dim of size ``n`` is ``[floor(i n / m), ceil((i + 1) n / m))``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.families import name_reference
from clika_ref_aten.reduction import mean_of
from clika_ref_aten.size_arithmetic import make_index_range
from clika_ref_aten.spatial import POOLED_INDICES, SPATIAL_DIMS, allow_unbatched, ceil_divide, expand_per_dim

aten = torch.ops.aten


def _window_bounds(n, m):
    """Return the start and end indices of the windows, each ``int64[m, 1]``."""
    i = torch.arange(m)[:, None]
    return i * n // m, ((i + 1) * n + m - 1) // m


def _max_window_length(n, m):
    """Return the length of the longest window, or an upper bound where the sizes are symbolic."""
    if is_symbolic((n, m)):
        return ceil_divide(n, m) + 1
    starts, ends = _window_bounds(n, m)
    return int((ends - starts).max())


def _window_indices(op, n, m):
    """Return the indices of each window, ``int64[m, k]``, and a mask of those inside it, ``bool[m, k]``.

    ``k`` is the length of the longest possible window; shorter windows repeat their last index. The mask is None where
    all windows have that length.
    """
    if is_symbolic((n, m)):
        return _window_indices_at_runtime(op, n, m)
    starts, ends = _window_bounds(n, m)
    positions = starts + torch.arange(_max_window_length(n, m))
    inside = positions < ends
    mask = None if inside.all() else op.constant(inside, torch.bool)
    return op.constant(torch.minimum(positions, ends - 1), torch.int64), mask


def _window_indices_at_runtime(op, n, m):
    """Compute the results of `_window_indices` at run time."""
    length, count, one = (op.scalar(v, torch.int64) for v in (n, m, 1))
    count = op.Max(count, one) if op.sizes.may_be_zero(m) else count
    i = op.Unsqueeze(make_index_range(op, m), op.ints([1]))
    starts = op.Div(op.Mul(i, length), count)
    beyond = op.Sub(op.Add(op.Mul(op.Add(i, one), length), count), one)
    ends = op.Div(beyond, count)
    positions = op.Add(starts, make_index_range(op, _max_window_length(n, m)))
    return op.Min(positions, op.Sub(ends, one)), op.Less(positions, ends)


def _average_along(op, x, *, axis, trailing, n, m):
    """Average one dim of ``x``. Masked elements are replaced, not multiplied by 0, which turns infinities into NaN."""
    positions, inside = _window_indices(op, n, m)
    windows = op.Gather(x, positions, axis=axis)
    if inside is None:
        return op.ReduceMean(windows, op.ints([axis + 1]), keepdims=0)
    if trailing:
        inside = op.Unsqueeze(inside, op.ints(range(2, 2 + trailing)))
    sums = op.ReduceSum(op.Where(inside, windows, op.like(x, 0.0)), op.ints([axis + 1]), keepdims=0)
    return op.Div(sums, op.ReduceSum(op.cast(inside, op.dtype(x)), op.ints([1]), keepdims=0))


def _has_uniform_windows(lengths, counts):
    """Return whether the windows along each dim have one static length and do not overlap."""
    return not is_symbolic((*lengths, *counts)) and all(n % m == 0 for n, m in zip(lengths, counts, strict=True))


def _adaptive_avg_pool(dims):
    def lower(op, x, *, output_size):
        rank, lengths, counts = op.rank(x), op.shape(x)[-dims:], expand_per_dim(output_size, dims)
        axes = range(rank - dims, rank)
        if 0 in (*op.shape(x), *counts):
            return op.Expand(op.like(x, math.nan), op.ints(op.result.shape))
        if all(m == 1 for m in counts):
            return _mean(op, x, axes)
        if _has_uniform_windows(lengths, counts) and rank == dims + 2 and op.dtype(x) != torch.float64:
            kernel = [n // m for n, m in zip(lengths, counts, strict=True)]
            return op.AveragePool(x, kernel_shape=kernel, strides=kernel)
        pooled = x
        for axis, n, m in zip(axes, lengths, counts, strict=True):
            if m == 1:
                pooled = op.ReduceMean(pooled, op.ints([axis]), keepdims=1)
            elif n != m:
                pooled = _average_along(op, pooled, axis=axis, trailing=rank - axis - 1, n=n, m=m)
        return op.Identity(x) if pooled is x else pooled

    return lower


def _mean(op, x, axes):
    if axes.start == 2 and op.dtype(x) != torch.float64:  # ONNX Runtime has no double kernel
        return op.GlobalAveragePool(x)
    return mean_of(op, x, math.prod(op.shape(x)[i] for i in axes), op.ints(axes), keepdims=1)


def _adaptive_max_pool(dims):
    def lower(op, x, *, output_size):
        lengths, counts = op.shape(x)[-dims:], expand_per_dim(output_size, dims)
        if 0 in (*op.shape(x), *counts):
            empty = op.ints([*op.shape(x)[:2], *counts])
            return op.Expand(op.like(x, 0), empty), op.Expand(op.scalar(0, torch.int64), empty)
        if _has_uniform_windows(lengths, counts):
            kernel = [n // m for n, m in zip(lengths, counts, strict=True)]
            values, indices = op.MaxPool(x, outputs=2, kernel_shape=kernel, strides=kernel)
            # ONNX returns flat indices of the whole tensor, PyTorch of one plane
            return values, op.Mod(op.declare(indices, torch.int64), op.scalar(math.prod(lengths), torch.int64))
        if all(m == 1 for m in counts):
            windows = op.reshape(x, (*op.shape(x)[:2], *counts, math.prod(lengths)))
            best = op.ArgMax(windows, axis=dims + 2, keepdims=1)
            return op.Squeeze(op.GatherElements(windows, best, axis=-1), op.ints([-1])), op.Squeeze(best, op.ints([-1]))
        return _max_pool_by_gather(op, x, lengths, counts)

    return allow_unbatched(dims, lower)


def _max_pool_by_gather(op, x, lengths, counts):
    """Gather all windows and return the first largest element of each, with its flat index."""
    dims = len(counts)
    windows, indices = x, None
    for i, (n, m) in enumerate(zip(lengths, counts, strict=True)):
        positions, _ = _window_indices(op, n, m)
        windows = op.Gather(windows, positions, axis=2 + 2 * i)
        indices = positions if indices is None else _extend_flat_indices(op, indices, positions, n)
    windows = op.Transpose(windows, perm=[0, 1, *range(2, 2 + 2 * dims, 2), *range(3, 3 + 2 * dims, 2)])
    size = math.prod(_max_window_length(n, m) for n, m in zip(lengths, counts, strict=True))
    windows = op.reshape(windows, (*op.shape(x)[:2], *counts, size))
    indices = op.Transpose(indices, perm=[*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)])
    indices = op.Reshape(indices, op.ints([0] * dims + [-1]))
    best = op.ArgMax(windows, axis=dims + 2, keepdims=1)
    values = op.GatherElements(windows, best, axis=-1)
    indices = op.GatherElements(op.Expand(indices, op.Shape(windows)), best, axis=-1)
    return op.Squeeze(values, op.ints([-1])), op.Squeeze(indices, op.ints([-1]))


def _extend_flat_indices(op, indices, positions, n):
    """Extend flat indices by one dim of size ``n``: ``indices * n + positions``, for all pairs of windows."""
    return op.Add(op.Mul(op.Unsqueeze(indices, op.ints([-2, -1])), op.scalar(n, torch.int64)), positions)


def _declare(dims: int, *, largest: bool) -> Operator:
    """Declare the adaptive average or maximum pooling of ``dims`` spatial dims; the latter also returns indices."""
    name = f"adaptive_{'max' if largest else 'avg'}_pool{dims}d"
    pool = getattr(F, f"{name}_with_indices" if largest else name)
    names = [name] if largest or dims == 1 else [name, f"_{name}"]
    windows = f"each of ``output_size`` windows of ``x[n, c, {SPATIAL_DIMS[dims]}]``"
    doc = f"The largest element of {windows}, and its {POOLED_INDICES[dims]}." if largest else f"The mean of {windows}."

    @operator(
        *(getattr(aten, n).default for n in names),
        quant=SHARED_QPARAMS if largest else OWN_QPARAMS,
        error=EXACT if largest else DOT,
    )
    @name_reference(name, doc, returns_pair=largest)
    def adaptive_pool(x: Tensor, *, output_size: tuple[int, ...]) -> Tensor:
        return pool(x, output_size)

    @adaptive_pool.types
    def _(x, *, output_size):
        shape = (*x.shape[:-dims], *expand_per_dim(output_size, dims))
        return tuple(TensorType(dtype, shape) for dtype in (x.dtype, torch.int64)[: 1 + largest])

    adaptive_pool.onnx((_adaptive_max_pool if largest else _adaptive_avg_pool)(dims))

    @adaptive_pool.samples
    def _(draw, s):
        batch = (draw(s.integers(1, 3)),) if draw(s.choice(True, True, False)) else ()
        lengths = [draw(s.choice(5, 7, 6)) for _ in range(dims)]
        even = draw(s.choice(False, False, True))
        size = tuple(draw(s.choice(1, 2, n) if even else s.choice(3, 4, 2, 1, n, 9)) for n in lengths)
        dtype = (torch.float32, torch.float32, torch.float64)
        x = draw(s.tensor(shape=(*batch, draw(s.integers(1, 3)), *lengths), dtype=dtype, unique=largest))
        return s.call(x, output_size=draw(s.choice(size, size, (1,) * dims)))

    return adaptive_pool


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_declare(n, largest=False) for n in (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (_declare(n, largest=True) for n in (1, 2, 3))
