"""Pooling of regions of finite feature maps. A region is a row ``(image, x1, y1, x2, y2)``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT, INTERPOLATION
from clika_ref.core.operators import operator
from clika_ref.core.traits import OWN_QPARAMS, SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_torchvision.bilinear import interpolate

MAX_GATHERED = 2**22
"""Number of elements that one interpolation gathers at most."""

MIN_POSITION_SENSITIVE_SIZE = 0.1
"""The smallest height and width of a region in `ps_roi_align`, in elements of the feature map."""


@operator(quant=OWN_QPARAMS, error=INTERPOLATION)
def roi_align(
    x: Tensor,
    rois: Tensor,
    *,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Average ``x[n, c, h, w]`` over bins of each region ``rois[k, 5]``: ``[k, c, pooled_height, pooled_width]``.

    ``sampling_ratio`` points along each dim of a bin are interpolated; if it is not positive, as many as the bin has
    elements. With ``aligned``, the center of element 0 is at 0.5, otherwise at 0, and regions have at least the size 1.

    Source: torchvision/csrc/ops/cpu/roi_align_kernel.cpp
    """
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    sizes = corners[:, 2:] - corners[:, :2]
    sizes = sizes if aligned else sizes.clamp(min=1)
    return _average_bins(x, rois[:, 0], corners[:, :2], sizes, (pooled_height, pooled_width), sampling_ratio)


def _average_bins(
    x: Tensor, images: Tensor, corners: Tensor, sizes: Tensor, bins: tuple[int, int], sampling_ratio: int
) -> Tensor:
    """Average interpolated points over the bins of each region, given its first corner and size as (x, y).

    Raises:
        ValueError: the feature maps have no elements; torchvision's kernel then reads memory outside them.
    """
    if 0 in x.shape[-2:]:
        raise ValueError(f"the feature maps have the shape {tuple(x.shape)}, so no region has elements")
    if sampling_ratio <= 0:  # the number of points differs
        groups = [[position] for position in range(len(images))]
    else:
        groups = _group_regions(images, MAX_GATHERED // (x.shape[1] * math.prod(bins) * sampling_ratio**2) or 1)
    pooled = x.new_zeros((len(images), x.shape[1], *bins))
    for group in groups:
        own = torch.tensor(group, device=x.device)
        lines = [_spread_points(corners[own, d], sizes[own, d], bins[1 - d], sampling_ratio) for d in (1, 0)]
        pooled[own] = _average_points(x[images[group[0]].long()], *lines)
    return pooled


def _group_regions(images: Tensor, size: int) -> list[list[int]]:
    """Return the positions of the regions of each image, in groups of at most a size."""
    by_image: dict[int, list[int]] = {}
    for position, image in enumerate(images.long().tolist()):
        by_image.setdefault(image, []).append(position)
    return [own[first : first + size] for own in by_image.values() for first in range(0, len(own), size)]


def _average_points(image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Average a feature map ``[c, h, w]`` over the bins of regions: ``[k, c, tall, wide]``.

    ``rows[k, tall, down]`` and ``columns[k, wide, across]`` are the positions of the points of each bin.
    """
    (count, tall, down), (_, wide, across) = rows.shape, columns.shape
    shape = count, tall, down, wide, across
    points = [line.expand(shape).reshape(1, -1) for line in (rows[:, :, :, None, None], columns[:, None, None, :, :])]
    found = interpolate(image.unsqueeze(0), *points, is_zero_outside=False)
    parts = found.reshape(image.shape[0], *shape)
    averages = parts.mean((3, 5)) if down * across else parts.sum((3, 5))
    return averages.transpose(0, 1)


def _spread_points(starts: Tensor, sizes: Tensor, count: int, sampling_ratio: int) -> Tensor:
    """Return the positions of the points in each bin along a dim of regions, ``[region, bin, point]``.

    With a ``sampling_ratio`` that is not positive there is one region, whose size gives the number of points.
    """
    steps = (sizes / count)[:, None, None]
    points = sampling_ratio if sampling_ratio > 0 else max(int(steps.detach().ceil()), 0)
    inside = (torch.arange(points, device=starts.device) + 0.5) * steps / max(points, 1)
    return starts[:, None, None] + torch.arange(count, device=starts.device)[:, None] * steps + inside


@roi_align.from_torch("torchvision.roi_align.default")
def _(x, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    return roi_align.call(
        x,
        rois,
        spatial_scale=spatial_scale,
        pooled_height=pooled_height,
        pooled_width=pooled_width,
        sampling_ratio=sampling_ratio,
        aligned=aligned,
    )


@roi_align.types
def _type_of_bins(x, rois, *, pooled_height, pooled_width, **_):
    return TensorType(x.dtype, (rois.shape[0], x.shape[1], pooled_height, pooled_width))


@roi_align.onnx
def _(op, x, rois, *, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    if aligned and sampling_ratio <= 0:  # no points lie in a region with corners in the wrong order
        rois = _widen(op, rois, 0.0)
    return _lower_roi_align(
        op,
        x,
        rois,
        spatial_scale=float(spatial_scale),
        output_height=pooled_height,
        output_width=pooled_width,
        sampling_ratio=max(sampling_ratio, 0),
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
    )


def _widen(op, rois, smallest):
    """Return regions of at least a height and width, from the same first corners."""
    image, first, last = op.Split(rois, op.ints([1, 2, 2]), axis=1, outputs=3)
    return op.Concat(image, first, op.Max(last, op.Add(first, op.like(first, smallest))), axis=1)


def _lower_roi_align(op, x, rois, **attrs):
    image, corners = op.Split(rois, op.ints([1, 4]), axis=1, outputs=2)
    images = op.cast(op.Squeeze(image, op.ints([1])), torch.int64)
    return op.RoiAlign(x, corners, images, mode="avg", **attrs)


@roi_align.samples
def _(draw, s):
    return s.call(
        *_draw_regions(draw, s, channels=draw(s.integers(1, 3))),
        **_draw_pooling(draw, s),
        sampling_ratio=draw(s.choice(2, -1, 1, 3)),
        aligned=draw(s.booleans()),
    )


def _draw_regions(draw, s, *, channels):
    """Draw feature maps, and regions whose corners have any order: one range holds for images and coordinates."""
    images = 8
    size = (draw(s.integers(4, 9)), draw(s.integers(4, 9)))
    x = draw(s.tensor(shape=(images, channels, *size), domain=(-1e6, 1e6), nan=False))
    count = draw(s.integers(1, 4))
    return x, draw(s.tensor(shape=(count, 5), low=0, high=images - 0.1, domain=(0, images - 0.1), nan=False))


def _draw_pooling(draw, s):
    return {
        "spatial_scale": draw(s.choice(1.0, 0.5, 4.0)),
        "pooled_height": draw(s.choice(2, 1, 3)),
        "pooled_width": draw(s.choice(2, 1, 3)),
    }


@operator(quant=SHARED_QPARAMS, error=EXACT)
def roi_pool(x: Tensor, rois: Tensor, *, spatial_scale: float, pooled_height: int, pooled_width: int) -> Tensor:
    """Maximum of ``x[n, c, h, w]`` over bins of each region ``rois[k, 5]``, rounded to whole elements; 0 if empty.

    Source: torchvision/csrc/ops/cpu/roi_pool_kernel.cpp
    """
    results = [x.new_zeros((0, x.shape[1], pooled_height, pooled_width))]
    for image, *corners in rois.tolist():
        left, top, right, bottom = (_round_half_away(corner * spatial_scale) for corner in corners)
        rows = _list_bins(top, bottom, pooled_height, x.shape[2])
        columns = _list_bins(left, right, pooled_width, x.shape[3])
        parts = [
            x[int(image), :, r, c].amax((1, 2)) if r.start < r.stop and c.start < c.stop else x.new_zeros(x.shape[1])
            for r in rows
            for c in columns
        ]
        results.append(torch.stack(parts, 1).reshape(1, -1, pooled_height, pooled_width))
    return torch.cat(results)


def _round_half_away(number: float) -> int:
    return int(abs(number) + 0.5) * (1 if number >= 0 else -1)


def _list_bins(start: int, end: int, count: int, size: int) -> list[slice]:
    """Return the elements of each bin between two inclusive positions, within ``size`` elements."""
    step = max(end - start + 1, 1) / count
    edges = [(int(i * step // 1), int(-(-(i + 1) * step // 1))) for i in range(count)]
    return [slice(min(max(start + a, 0), size), min(max(start + b, 0), size)) for a, b in edges]


@roi_pool.from_torch("torchvision.roi_pool.default")
def _(x, rois, spatial_scale, pooled_height, pooled_width):
    return roi_pool.call(x, rois, spatial_scale=spatial_scale, pooled_height=pooled_height, pooled_width=pooled_width)


roi_pool.types(_type_of_bins)


@roi_pool.onnx
def _(op, x, rois, *, spatial_scale, pooled_height, pooled_width):
    return op.MaxRoiPool(x, rois, pooled_shape=[pooled_height, pooled_width], spatial_scale=float(spatial_scale))


@roi_pool.samples
def _(draw, s):
    return s.call(*_draw_regions(draw, s, channels=draw(s.integers(1, 3))), **_draw_pooling(draw, s))


@operator(quant=OWN_QPARAMS, error=INTERPOLATION)
def ps_roi_align(
    x: Tensor, rois: Tensor, *, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> Tensor:
    """Average ``x[n, c * pooled_height * pooled_width, h, w]`` over bins of each region, from a channel of each bin.

    The result is ``[k, c, pooled_height, pooled_width]``; see `roi_align`.

    Source: torchvision/csrc/ops/cpu/ps_roi_align_kernel.cpp
    """
    corners = rois[:, 1:] * spatial_scale - 0.5
    sizes = (corners[:, 2:] - corners[:, :2]).clamp(min=MIN_POSITION_SENSITIVE_SIZE)
    bins = (pooled_height, pooled_width)
    averages = _average_bins(x, rois[:, 0], corners[:, :2], sizes, bins, sampling_ratio)
    channels = averages.shape[1] // (pooled_height * pooled_width)
    split = averages.reshape(len(rois), channels, *bins, *bins)
    return split.diagonal(dim1=2, dim2=4).diagonal(dim1=2, dim2=3)


@ps_roi_align.from_torch("torchvision.ps_roi_align.default")
def _(x, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio):
    return ps_roi_align.call(
        x,
        rois,
        spatial_scale=spatial_scale,
        pooled_height=pooled_height,
        pooled_width=pooled_width,
        sampling_ratio=sampling_ratio,
    )


@ps_roi_align.types
def _(x, rois, *, pooled_height, pooled_width, **_):
    channels = x.shape[1] // (pooled_height * pooled_width)
    return TensorType(x.dtype, (rois.shape[0], channels, pooled_height, pooled_width))


@ps_roi_align.onnx
def _(op, x, rois, *, spatial_scale, pooled_height, pooled_width, sampling_ratio):
    widened = _widen(op, rois, MIN_POSITION_SENSITIVE_SIZE / spatial_scale)
    averages = _lower_roi_align(
        op,
        x,
        widened,
        spatial_scale=float(spatial_scale),
        output_height=pooled_height,
        output_width=pooled_width,
        sampling_ratio=max(sampling_ratio, 0),
        coordinate_transformation_mode="half_pixel",
    )
    count = pooled_height * pooled_width
    by_bin = op.Reshape(averages, op.ints([0, op.shape(x)[1] // count, count, count]))  # there may be no regions
    own = op.constant(torch.eye(count), torch.bool)
    selected = op.ReduceSum(op.Where(own, by_bin, op.like(x, 0)), op.ints([3]), keepdims=False)
    return op.Reshape(selected, op.ints([0, 0, pooled_height, pooled_width]))


@ps_roi_align.samples
def _(draw, s):
    pooling = _draw_pooling(draw, s)
    channels = pooling["pooled_height"] * pooling["pooled_width"] * draw(s.integers(1, 2))
    return s.call(*_draw_regions(draw, s, channels=channels), **pooling, sampling_ratio=draw(s.choice(2, -1, 1)))
