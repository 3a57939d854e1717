"""Forms of calls that select elements by value or by index, and of calls on the parts of floats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload

aten = torch.ops.aten


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Reduce slices of a source into those of x that an index names."""
    wide, values = _at_least_1d(x), _at_least_1d(source)
    shape = [1] * wide.dim()
    shape[dim] = -1
    indices = index.reshape(shape).expand(values.shape)
    return wide.scatter_reduce(dim, indices, values, reduce, include_self=include_self).reshape(x.shape)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    """Write values to positions of the flattened tensor."""
    return x.flatten().index_put([index.flatten()], source.flatten(), accumulate).reshape(x.shape)


def _sort_known(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in order with NaN as infinity at the end, their indices, and how many are not NaN."""
    values, indices = torch.sort(torch.where(x.isnan(), torch.inf, x), stable=True, dim=dim)
    return values, indices, (~x.isnan()).sum(dim, keepdim=True)


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - ATen's
    """The lower median of the elements that are not NaN, and its index."""
    wide = _at_least_1d(x)
    values, indices, count = _sort_known(wide, dim)
    chosen = ((count - 1) // 2).clamp(min=0)
    found = torch.where(count == 0, torch.nan, values.gather(dim, chosen))
    results = found, indices.gather(dim, chosen)
    if x.dim() == 0:
        return results[0].reshape(()), results[1].reshape(())
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


def _nanmedian(x: Tensor) -> Tensor:
    """The lower median of all elements that are not NaN."""
    return _nanmedian_along(x.flatten(), 0)[0]


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - ATen's
    """The smallest of the most frequent elements, and its last index."""
    wide = _at_least_1d(x).movedim(dim, -1)
    counts = (wide[..., None] == wide[..., None, :]).sum(-1)
    is_frequent = counts == counts.amax(-1, keepdim=True)
    largest = torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).max
    value = torch.where(is_frequent, wide, largest).amin(-1, keepdim=True)
    positions = torch.arange(wide.shape[-1], device=x.device)
    index = torch.where(wide == value, positions, -1).amax(-1, keepdim=True)
    results = value.movedim(-1, dim), index.movedim(-1, dim)
    if x.dim() == 0:
        return results[0].reshape(()), results[1].reshape(())
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mantissa in [1/2, 1) and the exponent, ``int32``."""
    size = x.abs().double()
    is_plain = (size > 0) & size.isfinite()
    exponent = torch.where(is_plain, size, 1.0).log2().floor() + 1
    mantissa = x.double() * torch.exp2(-exponent)
    is_large, is_small = mantissa.abs() >= 1, is_plain & (mantissa.abs() < 0.5)  # the logarithm is rounded
    mantissa = torch.where(is_large, mantissa / 2, torch.where(is_small, mantissa * 2, mantissa))
    exponent = exponent + is_large.double() - is_small.double()
    found = torch.where(is_plain, mantissa, x.double()).to(x.dtype)
    return found, torch.where(is_plain, exponent, 0.0).to(torch.int32)


def _nextafter(x: Tensor, other: Tensor) -> Tensor:
    """The next number of the dtype after x in the direction of another number."""
    limits = torch.finfo(torch.promote_types(x.dtype, other.dtype))
    start, end = torch.broadcast_tensors(x.double(), other.double())
    mantissa, exponent = _frexp(start)
    step = torch.exp2(exponent.double() - 1) * limits.eps
    is_inward = (end - start).sign() * start.sign() < 0
    step = torch.where(is_inward & (mantissa.abs() == 0.5), step / 2, step)  # a power of two: half the distance
    step = torch.where(start == 0, 0.0, step).clamp(min=limits.smallest_normal * limits.eps)
    found = torch.where(start.isinf() & (start != end), start.sign() * limits.max, start + (end - start).sign() * step)
    found = torch.where(start.isnan() | end.isnan(), torch.nan, found)
    return torch.where(start == end, end, found).to(x.dtype)


def _clamp_indices(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if index is None else index.clamp(-size, size - 1) for index, size in zip(indices, x.shape, strict=False)
    ]


def _masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    """Elements at indices, and a number where the mask is false: indices may be out of range there."""
    return aten.index(x, _clamp_indices(x, indices)).masked_fill(~mask, fill)


def _masked_index_put_accumulate(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """Add values at indices where the mask is true."""
    return aten.index_put(x, _clamp_indices(x, indices), values.masked_fill(~mask, 0), True)


def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The positions ``[size, dim]`` of the first elements that are not 0, filled up with a number."""
    is_found = (x != 0).flatten()
    order = torch.sort((~is_found).long(), stable=True).indices
    order = torch.cat([order, order.new_zeros((size,))])[:size]
    columns: list[Tensor] = []
    for length in reversed(x.shape):
        size_along = torch.sym_max(length, 1)  # nothing is found in an empty tensor
        columns.insert(0, order.remainder(size_along))
        order = order.div(size_along, rounding_mode="floor")
    if not columns:
        return order.new_zeros((size, 0))
    is_row = torch.arange(size, device=x.device) < is_found.sum()
    return torch.where(is_row[:, None], torch.stack(columns, 1), fill_value)


SEGMENT_STARTS = {"max": -torch.inf, "min": torch.inf, "sum": 0.0, "mean": 0.0, "prod": 1.0}
"""Results of each reduction of no elements."""

SEGMENT_REDUCTIONS = {"max": "amax", "min": "amin", "sum": "sum", "mean": "sum", "prod": "prod"}
"""Names of the reductions in `torch.scatter_reduce`; a mean is divided at the end."""


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,  # noqa: ARG001 - PyTorch has no kernel with it
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,  # noqa: ARG001 - a graph checks no values
    initial: float | None = None,
) -> Tensor:
    """Reduce consecutive elements along an axis; segments are given by their lengths or offsets.

    Each segment starts with ``initial``, or the result of no elements.
    """
    if lengths is None:
        assert offsets is not None  # PyTorch requires one of the two
        lengths, ends = offsets.diff(dim=axis), offsets[..., 1:]
    else:
        ends = lengths.cumsum(axis)
    positions = torch.arange(data.shape[axis], device=data.device)
    segment = (positions >= ends[..., None]).sum(-2)
    start = SEGMENT_STARTS[reduce] if initial is None else initial
    trailing = data.shape[axis + 1 :]
    index = segment.reshape((*segment.shape, *[1] * len(trailing))).expand(data.shape)
    size = ends.shape[axis]
    whole = torch.full((*data.shape[:axis], size + 1, *trailing), start, dtype=data.dtype, device=data.device)
    found = whole.scatter_reduce(axis, index, data, SEGMENT_REDUCTIONS[reduce]).narrow(axis, 0, size)
    if reduce != "mean":
        return found
    divisor = lengths.reshape((*lengths.shape, *[1] * len(trailing))).to(data.dtype)
    found = found / divisor.clamp(min=1)
    return torch.where(divisor == 0, torch.nan, found) if initial is None else found


def _find_windows(x: Tensor, kernel: int, count: int, dim: int, sample: Tensor) -> Tensor:
    """Return the elements along a dim of each window of a fractional pooling, ``int64[n, channel, window, kernel]``.

    Source: Graham, "Fractional Max-Pooling", 2014: pseudorandom windows.
    """
    last = x.shape[dim] - kernel
    numbers = torch.arange(count, device=x.device)
    step = last / (count - 1) if count > 1 else 0.0
    start = ((sample[..., None] + numbers) * step).long() - (sample[..., None] * step).long()
    start = torch.where(numbers == count - 1, last, start)
    return start[..., None] + torch.arange(kernel, device=x.device)


def _fractional_max_pool(
    x: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], samples: Tensor, *, is_reversed: bool
) -> tuple[Tensor, Tensor]:
    """The largest elements of random windows, and their positions in the flattened space.

    Args:
        x: the input ``[n, channel, *space]``, or without n.
        kernel_size: the size of a window in each dim.
        output_size: the number of windows in each dim.
        samples: random numbers ``[n, channel, dim]`` in [0, 1).
        is_reversed: whether samples belong to the dims from the last one.
    """
    rank = len(kernel_size)
    wide = x if x.dim() == rank + 2 else x[None]
    position = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, (kernel, count) in enumerate(zip(kernel_size, output_size, strict=True)):
        sample = samples[..., rank - 1 - dim if is_reversed else dim].to(x.dtype)
        own = _find_windows(wide, kernel, count, dim - rank, sample)
        shape = [1] * (2 * rank)
        shape[dim], shape[rank + dim] = count, kernel
        position = position * wide.shape[dim - rank] + own.reshape((*own.shape[:2], *shape))
    windows = position.flatten(2 + rank).flatten(2, -2)
    values = wide.flatten(2).gather(2, windows.flatten(2)).reshape(windows.shape)
    found, chosen = values.max(-1)
    indices = windows.gather(-1, chosen[..., None])[..., 0]
    results = (t.reshape((*wide.shape[:2], *output_size)) for t in (found, indices))
    pooled, indices = results if wide is x else (t[0] for t in results)
    return pooled, indices


SELECTION_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.index_reduce.default: _index_reduce,
    aten.put.default: _put,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_along,
    aten.mode.default: _mode,
    aten.frexp.Tensor: _frexp,
    aten.nextafter.default: _nextafter,
    aten._unsafe_masked_index.default: _masked_index,
    aten._unsafe_masked_index_put_accumulate.default: _masked_index_put_accumulate,
    aten.nonzero_static.default: _nonzero_static,
    aten.segment_reduce.default: _segment_reduce,
    aten.fractional_max_pool2d.default: functools.partial(_fractional_max_pool, is_reversed=True),
    aten.fractional_max_pool3d.default: functools.partial(_fractional_max_pool, is_reversed=False),
}
"""Forms by the call of PyTorch that they replace."""
