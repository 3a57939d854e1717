"""Forms of backwards without a decomposition of PyTorch: convolutions and pairwise distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload

aten = torch.ops.aten


def _convolution_backward(  # noqa: PLR0917 - ATen's
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,  # noqa: FBT001 - ATen's
    _output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias; None for those that are not wanted."""
    dims = weight.dim() - 2
    stride, padding, dilation = ([*v] * (dims if len(v) == 1 else 1) for v in (stride, padding, dilation))
    dx = dw = db = None
    if output_mask[0] and transposed:
        dx = aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * dims, groups)
        dx = _slice_spatial(dx, [slice(0, size) for size in x.shape[2:]])
    elif output_mask[0]:
        dx = aten.convolution(grad, weight, None, stride, [0] * dims, dilation, True, [0] * dims, groups)
        # The kernel skips the last elements of the padded input where the stride does not divide its length.
        skipped = [n + 2 * p - m for n, p, m in zip(x.shape[2:], padding, dx.shape[2:], strict=True)]
        if any(s > 1 for s in stride):
            for dim, count in enumerate(skipped, 2):
                dx = _pad_zeros(dx, dim, 0, count)
        dx = _slice_spatial(dx, [slice(p, p + n) for n, p in zip(x.shape[2:], padding, strict=True)])
    if output_mask[1]:
        read, swept = (x, grad) if transposed else (grad, x)
        dw = _correlate(read, swept, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        db = grad.sum([0, *range(2, grad.dim())])
    return dx, dw, db


def _pad_zeros(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Return x with zeros before and after it along a dim. PyTorch's pad fixes the sizes."""
    ends = [x.new_zeros([*x.shape[:dim], count, *x.shape[dim + 1 :]]) for count in (before, after)]
    return torch.cat([ends[0], x, ends[1]], dim)


def _slice_spatial(x: Tensor, slices: Sequence[slice]) -> Tensor:
    for dim, each in enumerate(slices, 2):
        if not (isinstance(each.start, int) and each.start == 0 and each.stop is x.shape[dim]):
            x = aten.slice(x, dim, each.start, each.stop, each.step or 1)
    return x


def _correlate(  # noqa: PLR0917 - the arguments of a convolution
    read: Tensor,
    swept: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return ``w[a, b, k] = sum over n, l of read[n, a, l] * swept[n, b, stride * l + dilation * k - padding]``."""
    padded = swept
    for dim, count in enumerate(padding, 2):
        padded = _pad_zeros(padded, dim, count, count) if count else padded
    first = read.unflatten(1, (groups, -1)).flatten(3)
    columns: list[Tensor] = []
    for offset in itertools.product(*(range(k) for k in weight.shape[2:])):
        starts = [d * k for d, k in zip(dilation, offset, strict=True)]
        slices = [
            slice(start, start + (n - 1) * s + 1, s) for start, n, s in zip(starts, read.shape[2:], stride, strict=True)
        ]
        second = _slice_spatial(padded, slices).unflatten(1, (groups, -1)).flatten(3)
        columns.append(torch.einsum("ngal,ngbl->gab", first, second))
    return torch.stack(columns, -1).reshape(weight.shape)


def _cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, distances: Tensor) -> Tensor:
    """Return the gradient of distances ``[..., n, m]`` for ``x1[..., n, d]``; that of a distance of 0 is 0."""
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return torch.zeros_like(x1)
    if p == 1:
        slope = difference.sign()
    elif math.isinf(p):
        slope = difference.sign() * (difference.abs() == distances.unsqueeze(-1))
    else:
        length = torch.where(distances == 0, 1, distances).unsqueeze(-1)
        power = difference if p == 2 else difference.sign() * difference.abs().pow(p - 1)
        slope = power / (length if p == 2 else length.pow(p - 1))
        slope = torch.where(distances.unsqueeze(-1) == 0, 0, slope)
    return (grad.unsqueeze(-1) * slope).sum(-2)


BACKWARD_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
    aten._cdist_backward.default: _cdist_backward,
}
"""Forms of backwards, by overload."""
