"""Weight clipping: scales per channel that miss least, where a few large weights would cost all others their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.quantization.scales import LEAST_SCALE, weight_scales
from clika_ref.quantization_scheme import Integers

STEP = 1 / 32
"""Shares of the whole that are tried lie so far apart."""

FEW_BITS = 4
"""With so few, coarse steps cost more than what is clipped: shares are tried down to a third, else to two thirds."""


def clipped_scales(weight: Tensor, axis: int | None, integers: Integers, importance: Tensor | None = None) -> Tensor:
    """Return the scales whose integers are nearest to a weight, in the mean of squares: never worse than no clipping.

    Args:
        weight: of a layer, in any float dtype.
        axis: the side of its output channels, each of which has a scale; None for one scale in all.
        integers: the kind that stands for it.
        importance: what an error of each element weighs, of a shape that broadcasts to that of the weight: the mean
            square of the input that it is multiplied with makes this the error of the layer's output, as far as inputs
            are uncorrelated. None weighs all alike.

    Returns:
        ``float32[channels]``, or ``float32[]`` where ``axis`` is None.
    """
    rows = _rows(weight.detach(), axis)
    weighs = None if importance is None else _rows(importance.detach().expand_as(weight), axis)
    whole = weight_scales(weight, axis, integers).reshape(-1, 1)
    best, least = whole, _error(rows, whole, integers, weighs)
    for step in range(1, 22 if integers.bits <= FEW_BITS else 11):
        scales = (whole * (1 - step * STEP)).clamp(min=LEAST_SCALE)
        error = _error(rows, scales, integers, weighs)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best.reshape(() if axis is None else (-1,))


def _rows(x: Tensor, axis: int | None) -> Tensor:
    """Return ``float32[channels, elements]``."""
    return x.float().reshape(1, -1) if axis is None else x.float().movedim(axis, 0).flatten(1)


def _error(rows: Tensor, scales: Tensor, integers: Integers, weighs: Tensor | None) -> Tensor:
    """Return the squares of what integers miss of each row, summed: ``float32[channels, 1]``."""
    missed = (rows / scales).round_().clamp_(integers.low, integers.high).mul_(scales).sub_(rows).square_()
    return (missed if weighs is None else missed.mul_(weighs)).sum(1, keepdim=True)
