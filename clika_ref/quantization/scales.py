"""Scales and zero points: which integers stand for a range, in float32 as runtimes compute them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.quantization.observers import Range
from clika_ref.quantization_scheme import Integers

LEAST_SCALE = float(torch.finfo(torch.float32).tiny)
"""A smaller scale is no normal float32: runtimes flush it to 0, and what is divided by it is infinite."""

BIAS_LIMIT = 2**31 - 128
"""The largest float32 below what 32 bits hold: no bias may need more steps."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``float = (integer - zero_point) * scale``, the scale being a float32."""

    scale: float
    zero_point: int


def scale_of(covered: Range, integers: Integers) -> Scale:
    """Return the scale at which integers cover a range, 0 being one of them exactly.

    A range that is nothing but 0 gets scale 1, at which any element that comes later keeps its place.
    """
    if covered.is_point:
        return Scale(1.0, 0)
    if integers.is_symmetric and (integers.is_signed or covered.low < 0):
        middle = (integers.low + integers.high + 1) // 2
        return Scale(_float32(max(-covered.low, covered.high) / (integers.high - middle)), middle)
    scale = _float32((covered.high - covered.low) / (integers.high - integers.low))
    return Scale(scale, min(max(integers.low - round(covered.low / scale), integers.low), integers.high))


def weight_scales(weight: Tensor, axis: int | None, integers: Integers) -> Tensor:
    """Return a scale for each channel of a weight along a side, ``float32[channels]``, or for all of it, ``float32[]``.

    A channel of zeros gets scale 1: it has no integers but 0, whatever the scale is.
    """
    dims = [d for d in range(weight.ndim) if axis is None or d != axis % weight.ndim]
    reach = weight.detach().abs().amax(dims) if dims and weight.numel() else weight.detach().abs()
    scales = (reach.double() / integers.high).float().clamp(min=LEAST_SCALE)
    return torch.where(reach == 0, torch.ones_like(scales), scales)


def raised_for_bias(scales: Tensor, bias: Tensor, input_scale: float) -> Tensor:
    """Return weight scales at which no bias overflows, in the shape given: those that are too small are raised.

    A bias is an integer of 32 bits whose scale must be that of the input times that of the weight: a runtime that adds
    it to the sum of products multiplies neither.
    """
    needed = bias.detach().abs().double() / (float(input_scale) * BIAS_LIMIT)
    return torch.maximum(scales, _rounded_up(needed if scales.ndim else needed.amax()))


def quantized_bias(bias: Tensor, input_scale: float, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bias as ``int32[channels]``, and its scales: the product in float32 that runtimes ask for.

    Plans have scales at which each fits; what has been trained since beyond all bounds is cut off.
    """
    own = torch.tensor(input_scale, dtype=torch.float32) * scales
    steps = (bias.detach().double() / own.double()).round().clamp(-BIAS_LIMIT, BIAS_LIMIT)
    return steps.to(torch.int32), own


def _float32(scale: float) -> float:
    return max(torch.tensor(scale, dtype=torch.float64, device="cpu").float().item(), LEAST_SCALE)


def _rounded_up(x: Tensor) -> Tensor:
    """Return the least float32 that are not below some float64."""
    near = x.float()
    return torch.where(near.double() < x, near.nextafter(torch.full_like(near, torch.inf)), near)
