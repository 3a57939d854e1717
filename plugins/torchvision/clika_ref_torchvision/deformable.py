"""Deformable convolution: each point of the kernel is moved by an offset, and weighted by a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType
from clika_ref_torchvision.bilinear import interpolate

DEFORM_CONV_OPSET = 19
"""The first ONNX opset with DeformConv."""


@operator(error=COMPOSE)
def deform_conv2d(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    offset_groups: int,
) -> Tensor:
    """Convolve ``x[n, c, h, w]`` with ``weight[o, c / groups, kh, kw]`` at moved points.

    ``offset[n, offset_groups * kh * kw * 2, oh, ow]`` moves each point by (y, x), and
    ``mask[n, offset_groups * kh * kw, oh, ow]`` scales it. Points outside are 0.

    Source: torchvision/csrc/ops/cpu/deform_conv2d_kernel.cpp; Zhu et al., Deformable ConvNets v2.
    """
    batch, channels = x.shape[:2]
    kernel, size = weight.shape[2:], offset.shape[2:]
    points = kernel[0] * kernel[1]
    moves = offset.reshape(batch * offset_groups, points, 2, *size)
    lines = [
        torch.arange(size[d], device=x.device)[None] * stride[d]
        - padding[d]
        + torch.arange(kernel[d], device=x.device)[:, None] * dilation[d]
        for d in range(2)
    ]  # [kernel position, result position]
    rows = lines[0].repeat_interleave(kernel[1], 0)[None, :, :, None] + moves[:, :, 0]
    columns = lines[1].repeat(kernel[0], 1)[None, :, None, :] + moves[:, :, 1]
    maps = x.reshape(batch * offset_groups, channels // offset_groups, *x.shape[2:])
    found = interpolate(maps, rows.flatten(1), columns.flatten(1), is_zero_outside=True)
    found = found.reshape(batch, offset_groups, channels // offset_groups, points, -1)
    if mask is not None:
        found = found * mask.reshape(batch, offset_groups, 1, points, -1)
    patches = found.reshape(batch, groups, channels // groups * points, -1)
    result = weight.reshape(groups, weight.shape[0] // groups, -1) @ patches
    result = result.reshape(batch, weight.shape[0], *size)
    return result if bias is None else result + bias[:, None, None]


@deform_conv2d.from_torch("torchvision.deform_conv2d.default")
def _(x, weight, offset, mask, bias, *numbers):
    stride, padding, dilation = (tuple(numbers[i : i + 2]) for i in (0, 2, 4))
    groups, offset_groups, use_mask = numbers[6:]
    return deform_conv2d.call(
        x,
        weight,
        offset,
        mask if use_mask else None,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        offset_groups=offset_groups,
    )


@deform_conv2d.types
def _(x, weight, offset, *_, **_attrs):
    return TensorType(x.dtype, (x.shape[0], weight.shape[0], *offset.shape[2:]))


@deform_conv2d.onnx
def _(op, x, weight, offset, mask, bias, *, stride, padding, dilation, groups, offset_groups):
    op.require_opset(DEFORM_CONV_OPSET)
    return op.DeformConv(
        x,
        weight,
        offset,
        bias,
        mask,
        kernel_shape=op.shape(weight)[2:],
        strides=stride,
        pads=(*padding, *padding),
        dilations=dilation,
        group=groups,
        offset_group=offset_groups,
    )


@deform_conv2d.samples
def _(draw, s):
    groups, offset_groups = draw(s.choice((1, 1), (2, 1), (1, 2), (2, 2)))
    kernel = tuple(draw(s.integers(1, 3)) for _ in range(2))
    stride, padding, dilation = (
        tuple(draw(s.choice(*options)) for _ in range(2)) for options in ((1, 2), (0, 1), (1, 2))
    )
    smallest = (max(d * (k - 1) + 1 - 2 * p, 1) for k, p, d in zip(kernel, padding, dilation, strict=True))
    batch, size = draw(s.integers(1, 2)), tuple(n + draw(s.integers(1, 4)) for n in smallest)
    channels, outputs = 2 * draw(s.integers(1, 2)), 2 * draw(s.integers(1, 2))
    result = tuple(
        (n + 2 * p - d * (k - 1) - 1) // t + 1
        for n, p, d, k, t in zip(size, padding, dilation, kernel, stride, strict=True)
    )
    points = offset_groups * kernel[0] * kernel[1]
    offset = draw(s.tensor(shape=(batch, 2 * points, *result), low=-2, high=2, domain=(-9, 9), nan=False))
    mask = draw(s.tensor(shape=(batch, points, *result), low=0, high=1)) if draw(s.booleans()) else None
    bias = draw(s.tensor(shape=(outputs,))) if draw(s.booleans()) else None
    x, weight = (
        draw(s.tensor(shape=shape)) for shape in ((batch, channels, *size), (outputs, channels // groups, *kernel))
    )
    return s.call(
        x,
        weight,
        offset,
        mask,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        offset_groups=offset_groups,
    )
