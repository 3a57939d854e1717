"""Scales and zero points of ranges, in float32 as runtimes compute them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.calibration.observers import Range

MIN_SCALE = float(torch.finfo(torch.float32).tiny)
"""The smallest normal float32: runtimes flush smaller scales to 0, and a division by them is infinite."""

INT32_BIAS_LIMIT = 2**31 - 128
"""The largest float32 below the maximum of INT32: no bias may need more steps."""

MAX_INT8_PRODUCT = 255 * 128
"""The largest product of a UINT8 activation, after its zero point, and an INT8 weight."""

MIN_BIAS_STEPS = 2**24
"""Number of steps that a bias may always need: float32 holds them exactly."""


@dataclass(frozen=True, slots=True)
class QParams:
    """``float = (integer - zero_point) * scale``, with a float32 scale."""

    scale: float
    zero_point: int


def compute_qparams(covered: Range, quantized_type: QuantizedType) -> QParams:
    """Return the scale and zero point that cover a range, with 0 represented exactly.

    A range of only 0 gets scale 1, which rounds later elements to whole numbers.
    """
    if covered.is_point:
        return QParams(1.0, 0)
    if quantized_type.is_symmetric and (quantized_type.is_signed or covered.low < 0):
        middle = (quantized_type.low + quantized_type.high + 1) // 2
        return QParams(_round_to_float32(max(-covered.low, covered.high) / (quantized_type.high - middle)), middle)
    scale = _round_to_float32((covered.high - covered.low) / (quantized_type.high - quantized_type.low))
    return QParams(
        scale, min(max(quantized_type.low - round(covered.low / scale), quantized_type.low), quantized_type.high)
    )


def compute_weight_scales(weight: Tensor, axis: int | None, quantized_type: QuantizedType) -> Tensor:
    """Return a scale for each channel of a weight along a dim, ``float32[channels]``, or for all of it, ``float32[]``.

    A channel of zeros gets scale 1: it is quantized to 0 with any scale.
    """
    dims = [d for d in range(weight.ndim) if axis is None or d != axis % weight.ndim]
    reach = weight.detach().abs().amax(dims) if dims and weight.numel() else weight.detach().abs()
    scales = (reach.double() / quantized_type.high).float().clamp(min=MIN_SCALE)
    return torch.where(reach == 0, torch.ones_like(scales), scales)


def raise_scales_for_bias(scales: Tensor, bias: Tensor, input_scale: float, row_length: int = 0) -> Tensor:
    """Raise weight scales that are so small that a sum with the bias would overflow; returns the same shape.

    An INT32 bias has the input scale times the weight scale: a runtime that adds it to the accumulator rescales
    neither. Of the range of INT32, the bias takes what ``row_length`` products of 8 bits leave.
    """
    limit = max(INT32_BIAS_LIMIT - MAX_INT8_PRODUCT * row_length, MIN_BIAS_STEPS)
    needed = bias.detach().abs().double() / (float(input_scale) * limit)
    return torch.maximum(scales, _round_up(needed if scales.ndim else needed.amax()))


def quantize_bias(bias: Tensor, input_scale: float, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bias as ``int32[channels]``, and its scales: the float32 product that runtimes require.

    With the scales of a plan each bias fits; a bias that training has moved beyond all bounds is clipped.
    """
    own = torch.tensor(input_scale, dtype=torch.float32) * scales
    steps = (bias.detach().double() / own.double()).round().clamp(-INT32_BIAS_LIMIT, INT32_BIAS_LIMIT)
    return steps.to(torch.int32), own


def _round_to_float32(scale: float) -> float:
    return max(torch.tensor(scale, dtype=torch.float64, device="cpu").float().item(), MIN_SCALE)


def _round_up(x: Tensor) -> Tensor:
    """Round float64 up to float32."""
    near = x.float()
    return torch.where(near.double() < x, near.nextafter(torch.full_like(near, torch.inf)), near)
