"""Weight clipping: scales with the least squared error, so that few large weights do not cost the others precision."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.qdq.qparams import MIN_SCALE, compute_weight_scales

CLIPPING_STEP = 1 / 32
"""Distance between the scales that are tried, as a share of the scale without clipping."""

MAX_LOW_BITS = 4
"""Widths for which coarse steps cost more than clipping: scales are tried down to a third, else to two thirds."""


def find_clipped_scales(
    weight: Tensor, axis: int | None, quantized_type: QuantizedType, importance: Tensor | None = None
) -> Tensor:
    """Return the scales with the least mean squared quantization error of a weight; never worse than without clipping.

    Source: Nagel et al., A White Paper on Neural Network Quantization (2021), section 3.1.

    Args:
        weight: of a layer, in any float dtype.
        axis: the dim of the output channels, with a scale for each; None for a single scale.
        quantized_type: the quantized type.
        importance: factor for the squared error of each element; broadcasts to the shape of the weight. The mean square
            of the matching input turns the result into the error of the layer's output, if inputs are uncorrelated.
            None counts all elements equally.

    Returns:
        ``float32[channels]``, or ``float32[]`` if ``axis`` is None.
    """
    rows = _flatten_channels(weight.detach(), axis)
    weights = None if importance is None else _flatten_channels(importance.detach().expand_as(weight), axis)
    whole = compute_weight_scales(weight, axis, quantized_type).reshape(-1, 1)
    best, lowest = whole, _sum_squared_error(rows, whole, quantized_type, weights)
    for step in range(1, 22 if quantized_type.bits <= MAX_LOW_BITS else 11):
        scales = (whole * (1 - step * CLIPPING_STEP)).clamp(min=MIN_SCALE)
        error = _sum_squared_error(rows, scales, quantized_type, weights)
        best = torch.where(error < lowest, scales, best)
        lowest = torch.minimum(error, lowest)
    return best.reshape(() if axis is None else (-1,))


def _flatten_channels(x: Tensor, axis: int | None) -> Tensor:
    """Return a weight as ``float32[channels, elements]``."""
    return x.float().reshape(1, -1) if axis is None else x.float().movedim(axis, 0).flatten(1)


def _sum_squared_error(rows: Tensor, scales: Tensor, quantized_type: QuantizedType, weights: Tensor | None) -> Tensor:
    """Return the squared quantization error of each row, ``float32[channels, 1]``."""
    errors = (rows / scales).round_().clamp_(quantized_type.low, quantized_type.high).mul_(scales).sub_(rows).square_()
    return (errors if weights is None else errors.mul_(weights)).sum(1, keepdim=True)
