"""Histograms as searches in the edges of bins and sums over the elements of each bin."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload

aten = torch.ops.aten


def _make_edges(values: Tensor, bins: int, limits: Sequence[float] | None) -> Tensor:
    """Return the edges of bins of one width: between limits, or the smallest and the largest value.

    Equal limits are moved apart by 1. The second half is computed from the end, as in ``torch.linspace``.
    """
    if limits is None:
        if not values.numel():
            low, high = values.new_zeros(()), values.new_zeros(())
        else:
            low, high = values.amin(), values.amax()
    else:
        low, high = (torch.full((), n, dtype=values.dtype, device=values.device) for n in limits)
    is_equal = low == high
    low, high = torch.where(is_equal, low - 0.5, low), torch.where(is_equal, high + 0.5, high)
    width = (high - low) / bins
    position = torch.arange(bins + 1, device=values.device)
    return torch.where(position < (bins + 1) // 2, low + width * position, high - width * (bins - position))


def _count_in_bins(points: Tensor, edges: Sequence[Tensor], weight: Tensor | None, *, is_density: bool) -> Tensor:
    """Return the histogram of ``points[n, dim]``: the sum of weights in each bin. The last bin includes its end."""
    shape = [len(own) - 1 for own in edges]
    columns = points.unbind(1)
    index = torch.zeros_like(columns[0], dtype=torch.int64)
    is_inside = torch.ones_like(columns[0], dtype=torch.bool)
    for column, own, count in zip(columns, edges, shape, strict=True):
        found = torch.searchsorted(own.contiguous(), column.contiguous(), right=True) - 1
        index = index * count + found.clamp(0, count - 1)
        is_inside = is_inside & (column >= own[0]) & (column <= own[-1])
    given = torch.ones_like(columns[0]) if weight is None else weight.flatten().to(points.dtype)
    total = points.new_zeros(math.prod(shape)).index_add(0, index, torch.where(is_inside, given, 0.0)).reshape(shape)
    if not is_density:
        return total
    volume = functools.reduce(lambda a, b: a[..., None] * b, [own.diff() for own in edges])
    return total / (volume * total.sum())


def _histogram(
    x: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    edges = _make_edges(x, bins, range)
    return _count_in_bins(x.reshape(-1, 1), [edges], weight, is_density=density), edges


def _histogram_of_edges(
    x: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    return _count_in_bins(x.reshape(-1, 1), [bins], weight, is_density=density), bins.clone()


def _histogramdd(
    x: Tensor,
    bins: Sequence[int] | Sequence[Tensor] | int,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,  # noqa: FBT001, FBT002 - ATen's
) -> tuple[Tensor, list[Tensor]]:
    points = x.flatten(0, -2)
    counts = [bins] * x.shape[-1] if isinstance(bins, int) else bins
    edges: list[Tensor] = []
    for dim, own in enumerate(counts):
        limits = None if range is None else range[2 * dim : 2 * dim + 2]
        edges.append(own.clone() if isinstance(own, Tensor) else _make_edges(points[:, dim], own, limits))
    return _count_in_bins(points, edges, weight, is_density=density), edges


HISTOGRAM_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.histogram.bin_ct: _histogram,
    aten.histogram.bins_tensor: _histogram_of_edges,
    aten.histogramdd.default: _histogramdd,
    aten.histogramdd.int_bins: _histogramdd,
    aten.histogramdd.TensorList_bins: _histogramdd,
}
"""Forms by the call of PyTorch that they replace."""
