"""What ONNX Runtime computes instead of what eager does, for the deviations that a formula describes best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LIMITS = {torch.int64: 2.0**63, torch.int32: 2.0**31}
"""The first number beyond each dtype that is summed and multiplied."""


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, num_groups: int, eps: float) -> Tensor:
    """Normalize first and scale then, where eager folds mean, deviation and weight into one factor and one term."""
    normal = F.group_norm(x, num_groups, None, None, eps)
    shape = (-1, *(1,) * (x.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to integers, those beyond the dtype to its least and its greatest."""
    limit, info = LIMITS[dtype], torch.iinfo(dtype)
    inside = x.clamp(-limit, limit - 1).to(dtype)
    return torch.where(x >= limit, info.max, torch.where(x < -limit, info.min, inside)).to(dtype)


def sum_of_integers(x: Tensor, *, dim: tuple[int, ...] | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Add up integers one by one in float64, and saturate."""
    result = torch.nansum(x, dim, keepdim, dtype=dtype)
    if result.dtype not in LIMITS or not x.numel() or not x.ndim:
        return result
    sides = range(x.ndim) if not dim else sorted(d % x.ndim for d in dim)
    kept = [d for d in range(x.ndim) if d not in sides]
    rows = x.double().permute([*kept, *sides]).reshape(*(x.shape[d] for d in kept), -1)
    return saturated(rows.cumsum(-1)[..., -1], result.dtype).reshape(result.shape)


def product_of_integers(x: Tensor, *, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Multiply integers in float64, and saturate."""
    result = torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)
    if result.dtype not in LIMITS:
        return result
    wide = x.double()
    return saturated(torch.prod(wide) if dim is None else torch.prod(wide, dim, keepdim), result.dtype)


def power_of_integers(x: Tensor | int, y: Tensor | int) -> Tensor:
    """Raise integers in float64, and convert what comes out as the processor does."""
    bases, exponents = torch.broadcast_tensors(*(torch.as_tensor(v, dtype=torch.float64) for v in (x, y)))
    return bases.clone().map_(exponents, _power).to(torch.int64)


def _power(x: float, y: float) -> float:
    """Return ``x ** y`` as the C library does: torch's own is an ulp off, which integers show."""
    try:
        return math.pow(x, y)
    except (OverflowError, ValueError):
        return math.inf


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
