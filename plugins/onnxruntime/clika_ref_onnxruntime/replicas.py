"""Replicas of ONNX Runtime's kernels where they deviate from eager in ways best described by a formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_MODE = 2
"""`embedding_bag` mode ``max``; 0 is ``sum``, 1 ``mean``."""

NEAREST_MODE = 1
"""`grid_sampler` mode ``nearest``; 0 is ``bilinear``, 2 ``bicubic``."""

BORDER_PADDING = 1
"""`grid_sampler` padding ``border``; 0 is ``zeros``, 2 ``reflection``."""

INTEGER_LIMITS = {torch.int64: 2.0**63, torch.int32: 2.0**31}
"""The first number out of range of each dtype for sums and products."""


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, num_groups: int, eps: float) -> Tensor:
    """Normalize first, then scale. Eager combines mean, deviation and weight into one scale and one shift."""
    normal = F.group_norm(x, num_groups, None, None, eps)
    shape = (-1, *(1,) * (x.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Keep zeros. Eager multiplies them: 0 times an infinite weight is NaN."""
    return torch.where(x == 0, x, torch.prelu(x, weight))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to integers, saturating at the limits of the dtype."""
    limit, info = INTEGER_LIMITS[dtype], torch.iinfo(dtype)
    inside = x.clamp(-limit, limit - 1).to(dtype)
    return torch.where(x >= limit, info.max, torch.where(x < -limit, info.min, inside)).to(dtype)


def multiply_integers(x: Tensor, *, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Multiply integers in float64, with saturation."""
    result = torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)
    if result.dtype not in INTEGER_LIMITS:
        return result
    wide = x.to(result.dtype).double()
    return saturate(torch.prod(wide) if dim is None else torch.prod(wide, dim, keepdim), result.dtype)


def raise_integers(x: Tensor | int, y: Tensor | int) -> Tensor:
    """Compute integer powers in float64; out of range becomes the minimum. A constant exponent above 1 multiplies."""
    result = torch.pow(x, y)  # pyright: ignore[reportCallIssue, reportArgumentType] - never two numbers
    if result.is_floating_point() or (isinstance(y, int) and y > 1):
        return result
    wide = result.dtype if result.dtype in INTEGER_LIMITS else torch.int64
    bases, exponents = torch.broadcast_tensors(*(torch.as_tensor(v, dtype=torch.float64) for v in (x, y)))
    raised = bases.clone().map_(exponents, _power)
    inside = raised.abs() < INTEGER_LIMITS[wide]
    minimum = torch.iinfo(wide).min
    return torch.where(inside, raised, 0.0).to(wide).where(inside, minimum).to(result.dtype)


def _power(x: float, y: float) -> float:
    """Return ``x ** y`` as the C library does. torch.pow is off by an ulp, which integer results reveal."""
    try:
        return math.pow(x, y)
    except (OverflowError, ValueError):
        return math.inf


def scatter_or_bag_min_max(*operands: Any, **attrs: Any) -> Tensor:
    """Scatter with ``amax``/``amin``, or take the maximum of bags. Both handle NaN the same way."""
    return (max_of_bags if "mode" in attrs else scatter_min_max)(*operands, **attrs)


def max_of_bags(
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
    """Let a later number of a bag replace a NaN before it; sums and means are those of eager."""
    if mode != MAX_MODE or not weight.numel():
        counted = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx, **others}
        bag = torch.ops.aten.embedding_bag.padding_idx
        return bag(weight, indices, offsets, per_sample_weights=per_sample_weights, **counted)[0]
    bags = (offsets <= torch.arange(len(indices))[:, None]).sum(1) - 1
    if padding_idx is not None:
        counts = indices != padding_idx % len(weight)
        indices, bags = indices[counts], bags[counts]
    start = torch.full((len(offsets) - include_last_offset, weight.shape[1]), -math.inf, dtype=weight.dtype)
    positions = bags[:, None].expand(-1, weight.shape[1])
    found = scatter_min_max(start, positions, weight[indices], dim=0, reduce="amax", include_self=True)
    is_empty = bags.bincount(minlength=len(start)) == 0
    return found.masked_fill(is_empty[:, None], 0)


def scatter_min_max(
    x: Tensor, index: Tensor, src: Tensor | float, *, dim: int, reduce: str, include_self: bool
) -> Tensor:
    """Keep an element only if it compares larger than the new one. NaN never does, so a later number replaces it."""
    if reduce not in ("amax", "amin"):
        src = torch.as_tensor(src, dtype=x.dtype)
        src = src if src.ndim or not index.ndim else src.expand(index.shape)
        return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)
    sign = 1 if reduce == "amax" else -1
    whole, positions = torch.atleast_1d(x * sign).clone(), torch.atleast_1d(index)
    updates = torch.as_tensor(src, dtype=x.dtype) * sign
    updates = updates if updates.ndim else updates.expand(positions.shape)
    if not include_self:
        whole = whole.scatter(dim, positions, -math.inf)
    for at in itertools.product(*map(range, positions.shape)):
        to = list(at)
        to[dim] = int(positions[at])
        whole[tuple(to)] = max(updates[at], whole[tuple(to)])  # the first one, unless the second is larger
    return (whole * sign).reshape(x.shape)


def _through_float64(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pooling of integers that computes in float64."""

    def pool_in_float64(x: Tensor, **attrs: Any) -> Any:
        found = pool(x.double(), **attrs)
        if isinstance(found, Tensor):
            return found.to(x.dtype)
        return found[0].to(x.dtype), found[1]

    return pool_in_float64


max_pool2d = _through_float64(torch.max_pool2d)
max_pool3d = _through_float64(torch.max_pool3d)
max_pool2d_with_indices = _through_float64(F.max_pool2d_with_indices)


def grid_sampler(x: Tensor, grid: Tensor, *, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Map non-finite points to the first border, and include neighbors beyond a border with weight 0.

    In eager, such a point is NaN, skipped, or one of the borders, and neighbors beyond are skipped. Here 0 * Inf
    is NaN.
    """
    if padding_mode == BORDER_PADDING:  # as the lowering does
        grid = grid.clamp(-2, 2)
    pairs = zip(grid.flip(-1).unbind(-1), x.shape[2:], strict=True)
    lines = [torch.where(_to_positions(p, size, align_corners=align_corners).isfinite(), p, -1) for p, size in pairs]
    grid = torch.stack(lines[::-1], -1)
    eager = torch.grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners)
    if not x.numel():
        return eager
    if interpolation_mode == NEAREST_MODE and padding_mode > BORDER_PADDING:
        return _nearest(x, lines, align_corners=align_corners)
    if interpolation_mode or not padding_mode:
        return eager
    neighbors = [
        _neighbours(points, size, reflects=padding_mode > BORDER_PADDING, align_corners=align_corners)
        for points, size in zip(lines, x.shape[2:], strict=True)
    ]
    total = torch.zeros_like(eager)
    for corner in itertools.product((0, 1), repeat=len(neighbors)):
        weight = torch.ones_like(lines[0])
        at: list[Tensor] = []
        for (weights, positions), end in zip(neighbors, corner, strict=True):
            weight = weight * weights[end]
            at.append(positions[end])
        total = total + _gather_elements(x, at) * weight[:, None]
    return torch.where(total.isfinite() & eager.isfinite(), eager, total)


def _nearest(x: Tensor, lines: Sequence[Tensor], *, align_corners: bool) -> Tensor:
    """Round each point, then reflect. On ties, this selects the other element than eager."""
    at: list[Tensor] = []
    for points, size in zip(lines, x.shape[2:], strict=True):
        wide = points.float() if points.dtype == torch.float16 else points  # as the lowering does
        nearest = _to_positions(wide, size, align_corners=align_corners).round()
        at.append(_reflect_positions(nearest, size, align_corners=align_corners).clamp(0, size - 1).long())
    return _gather_elements(x, at)


def _gather_elements(x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Return the elements of each image at an index, given as one tensor per dim."""
    return torch.stack([image[(slice(None), *(a[n] for a in at))] for n, image in enumerate(x)])


def _neighbours(
    points: Tensor, size: int, *, reflects: bool, align_corners: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the weights and the indices of the two neighbors of each point along a dim."""
    at = _to_positions(points, size, align_corners=align_corners)
    before = at.floor()
    share = at - before
    ends = [_reflect_positions(p, size, align_corners=align_corners) if reflects else p for p in (before, before + 1)]
    first, second = (end.clamp(0, size - 1).long() for end in ends)
    return (1 - share, share), (first, second)


def _to_positions(points: Tensor, size: int, *, align_corners: bool) -> Tensor:
    """Return the positions of points in [-1, 1] along a dim; its first element is at 0."""
    return (points + 1) * (size - 1) / 2 if align_corners else ((points + 1) * size - 1) / 2


def _reflect_positions(at: Tensor, size: int, *, align_corners: bool) -> Tensor:
    """Reflect positions at the ends of a dim until they are inside."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    if high <= low:
        return torch.zeros_like(at)
    away, span = (at - low).abs(), high - low
    rest = away % span
    return torch.where((away / span).floor() % 2 == 0, low + rest, high - rest)
