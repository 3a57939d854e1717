"""What ONNX Runtime computes instead of what eager does, for the deviations that a formula describes best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 2
"""The number by which `embedding_bag` calls the largest elements of a bag; 0 is sums, 1 means."""

NEAREST = 1
"""The number by which `grid_sampler` calls the nearest element; 0 is linear, 2 cubic."""

BORDER = 1
"""The number by which `grid_sampler` calls padding with the border; 0 is zeros, 2 reflection."""

LIMITS = {torch.int64: 2.0**63, torch.int32: 2.0**31}
"""The first number beyond each dtype that is summed and multiplied."""


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, num_groups: int, eps: float) -> Tensor:
    """Normalize first and scale then, where eager folds mean, deviation and weight into one factor and one term."""
    normal = F.group_norm(x, num_groups, None, None, eps)
    shape = (-1, *(1,) * (x.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Keep zeros, which eager multiplies: 0 times an infinite weight is NaN there."""
    return torch.where(x == 0, x, torch.prelu(x, weight))


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to integers, those beyond the dtype to its least and its greatest."""
    limit, info = LIMITS[dtype], torch.iinfo(dtype)
    inside = x.clamp(-limit, limit - 1).to(dtype)
    return torch.where(x >= limit, info.max, torch.where(x < -limit, info.min, inside)).to(dtype)


def product_of_integers(x: Tensor, *, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Multiply integers in float64, and saturate."""
    result = torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)
    if result.dtype not in LIMITS:
        return result
    wide = x.to(result.dtype).double()
    return saturated(torch.prod(wide) if dim is None else torch.prod(wide, dim, keepdim), result.dtype)


def power_of_integers(x: Tensor | int, y: Tensor | int) -> Tensor:
    """Raise integers in float64; what is beyond the dtype becomes its least. A whole number above 1 multiplies."""
    result = torch.pow(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers
    if result.is_floating_point() or (isinstance(y, int) and y > 1):
        return result
    wide = result.dtype if result.dtype in LIMITS else torch.int64
    bases, exponents = torch.broadcast_tensors(*(torch.as_tensor(v, dtype=torch.float64) for v in (x, y)))
    raised = bases.clone().map_(exponents, _power)
    inside = raised.abs() < LIMITS[wide]
    least = torch.iinfo(wide).min
    return torch.where(inside, raised, 0.0).to(wide).where(inside, least).to(result.dtype)


def _power(x: float, y: float) -> float:
    """Return ``x ** y`` as the C library does: torch's own is an ulp off, which integers show."""
    try:
        return math.pow(x, y)
    except (OverflowError, ValueError):
        return math.inf


def extremes(*operands: Any, **attrs: Any) -> Tensor:
    """Scatter the largest or smallest elements, or find the largest ones of each bag: of NaN both make the same."""
    return (largest_of_bags if "mode" in attrs else scattered_extremes)(*operands, **attrs)


def largest_of_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    *,
    mode: int,
    include_last_offset: bool,
    padding_idx: int | None,
    **others: bool,
) -> Tensor:
    """Let a number replace a NaN of a row that comes before it in its bag; sums and means are eager's."""
    if mode != LARGEST or not weight.numel():
        counted = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx, **others}
        bag = torch.ops.aten.embedding_bag.padding_idx
        return bag(weight, indices, offsets, per_sample_weights=per_sample_weights, **counted)[0]
    bags = (offsets <= torch.arange(len(indices))[:, None]).sum(1) - 1
    if padding_idx is not None:
        counts = indices != padding_idx % len(weight)
        indices, bags = indices[counts], bags[counts]
    start = torch.full((len(offsets) - include_last_offset, weight.shape[1]), -math.inf, dtype=weight.dtype)
    places = bags[:, None].expand(-1, weight.shape[1])
    found = scattered_extremes(start, places, weight[indices], dim=0, reduce="amax", include_self=True)
    is_empty = bags.bincount(minlength=len(start)) == 0
    return found.masked_fill(is_empty[:, None], 0)


def scattered_extremes(
    x: Tensor, index: Tensor, src: Tensor | float, *, dim: int, reduce: str, include_self: bool
) -> Tensor:
    """Keep what is there only where it is larger, which nothing is than NaN: a later number replaces a NaN."""
    if reduce not in ("amax", "amin"):
        src = torch.as_tensor(src, dtype=x.dtype)
        src = src if src.ndim or not index.ndim else src.expand(index.shape)
        return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)
    sign = 1 if reduce == "amax" else -1
    whole, places = torch.atleast_1d(x * sign).clone(), torch.atleast_1d(index)
    updates = torch.as_tensor(src, dtype=x.dtype) * sign
    updates = updates if updates.ndim else updates.expand(places.shape)
    if not include_self:
        whole = whole.scatter(dim, places, -math.inf)
    for at in itertools.product(*map(range, places.shape)):
        to = list(at)
        to[dim] = int(places[at])
        whole[tuple(to)] = max(updates[at], whole[tuple(to)])  # the first one, unless the second is larger
    return (whole * sign).reshape(x.shape)


def _through_float64(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pooling of integers as of the float64 that they become."""

    def pooled(
        x: Tensor,
        *,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        ceil_mode: bool,
    ) -> Any:
        found = pool(x.double(), kernel_size, stride, padding, dilation, ceil_mode)
        if isinstance(found, Tensor):
            return found.to(x.dtype)
        return found[0].to(x.dtype), found[1]

    return pooled


max_pool2d = _through_float64(torch.max_pool2d)
max_pool3d = _through_float64(torch.max_pool3d)
max_pool2d_with_indices = _through_float64(F.max_pool2d_with_indices)


def grid_sampler(x: Tensor, grid: Tensor, *, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Take points that are not finite for the first border, and weigh neighbours beyond a border as well, by 0.

    In eager such a point is NaN, nothing or one of the borders, and neighbours beyond are left out: 0 * Inf is NaN.
    """
    if padding_mode == BORDER:  # as the lowering does
        grid = grid.clamp(-2, 2)
    pairs = zip(grid.flip(-1).unbind(-1), x.shape[2:], strict=True)
    lines = [torch.where(_places(p, side, align_corners=align_corners).isfinite(), p, -1) for p, side in pairs]
    grid = torch.stack(lines[::-1], -1)
    eager = torch.grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners)
    if not x.numel():
        return eager
    if interpolation_mode == NEAREST and padding_mode > BORDER:
        return _nearest(x, lines, align_corners=align_corners)
    if interpolation_mode or not padding_mode:
        return eager
    sides = [
        _neighbours(points, side, reflects=padding_mode > BORDER, align_corners=align_corners)
        for points, side in zip(lines, x.shape[2:], strict=True)
    ]
    total = torch.zeros_like(eager)
    for corner in itertools.product((0, 1), repeat=len(sides)):
        weight = torch.ones_like(lines[0])
        at: list[Tensor] = []
        for (weights, places), end in zip(sides, corner, strict=True):
            weight = weight * weights[end]
            at.append(places[end])
        total = total + _picked(x, at) * weight[:, None]
    return torch.where(total.isfinite() & eager.isfinite(), eager, total)


def _nearest(x: Tensor, lines: Sequence[Tensor], *, align_corners: bool) -> Tensor:
    """Round each point and reflect then: of two elements that are as near it is another one than eager takes."""
    at: list[Tensor] = []
    for points, side in zip(lines, x.shape[2:], strict=True):
        wide = points.float() if points.dtype == torch.float16 else points  # as the lowering does
        nearest = _places(wide, side, align_corners=align_corners).round()
        at.append(_brought_back(nearest, side, align_corners=align_corners).clamp(0, side - 1).long())
    return _picked(x, at)


def _picked(x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Return the elements of each image at places, of which there is a tensor for each side."""
    return torch.stack([image[(slice(None), *(a[n] for a in at))] for n, image in enumerate(x)])


def _neighbours(
    points: Tensor, side: int, *, reflects: bool, align_corners: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the weights of the neighbours before and behind each point along a side, and where they lie."""
    at = _places(points, side, align_corners=align_corners)
    before = at.floor()
    share = at - before
    ends = [_brought_back(p, side, align_corners=align_corners) if reflects else p for p in (before, before + 1)]
    first, second = (end.clamp(0, side - 1).long() for end in ends)
    return (1 - share, share), (first, second)


def _places(points: Tensor, side: int, *, align_corners: bool) -> Tensor:
    """Return where points of [-1, 1] lie among the elements of a side, the first of which lies at 0."""
    return (points + 1) * (side - 1) / 2 if align_corners else ((points + 1) * side - 1) / 2


def _brought_back(at: Tensor, side: int, *, align_corners: bool) -> Tensor:
    """Reflect places at the ends of a side until they lie within."""
    low, high = (0.0, side - 1.0) if align_corners else (-0.5, side - 0.5)
    if high <= low:
        return torch.zeros_like(at)
    away, span = (at - low).abs(), high - low
    rest = away % span
    return torch.where((away / span).floor() % 2 == 0, low + rest, high - rest)
