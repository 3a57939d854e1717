"""Fake quantization: floats rounded to quantized values, with gradients for the floats and for their scales.

Gradients pass straight through rounding, and are 0 where an element is clipped. An element that rounds to the minimum
or maximum is not clipped. The gradient of a scale is that of LSQ, divided by ``sqrt(elements)``.

Optimizers update the logarithm of a scale. Its gradient is ``sum(g * e) / sqrt(elements)``: ``g`` is the gradient of an
element, ``e`` its rounding error, or its value if it is clipped. The result is at most ``norm(g) * rms(e)``. It does
not depend on the unit of the tensor, and is small if nothing is clipped. LSQ instead moves the scale itself, by a step
that does not depend on its size. A scale of 8 bits is so small that a step of SGD multiplies it many times, and
training diverges.

Sources: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation
(2013), for gradients through rounding; Esser et al., Learned Step Size Quantization (2020), section 2.1, for those of
scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clika_ref.core.operators import operator
from clika_ref.quantization.qdq.layer_weights import reshape_along_dim
from clika_ref.quantization.qdq.qparams import INT32_BIAS_LIMIT


@operator()
def apply_log_scale(log_scale: Tensor, *, planned: float) -> Tensor:
    """``planned * exp(log_scale)``, in float32, for ``log_scale[1]``."""
    return planned * log_scale.exp()


@operator()
def apply_log_scales(log_scales: Tensor, planned: Tensor) -> Tensor:
    """``planned * exp(log_scales)`` in float32, for each channel or block; ``log_scales[1]`` is a single scale."""
    grown = log_scales.exp()
    return planned * (grown if planned.ndim else grown.reshape(()))


@operator()
def follow_norm_multiplier(scales: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """``scales[c, ...] * |now[c] / then[c]|``: follow the multiplier of a norm, so that the integers stay the same.

    Unchanged where either is 0, and if all channels share one scale.
    """
    if not scales.ndim:
        return scales
    now, then = now.detach().abs(), then.abs()
    share = torch.where((now > 0) & (then > 0), now / then, torch.ones_like(now)).to(scales.dtype)
    return scales * reshape_along_dim(share, 0, scales.ndim)


@operator()
def fake_quantize(x: Tensor, scale: Tensor, *, zero_point: int, low: int, high: int) -> Tensor:
    """Return ``(clamp(round(x / scale) + zero_point, low, high) - zero_point) * scale``: quantized and dequantized.

    The gradient of the scale is divided by the square root of the number of elements of one sample.
    """
    features = x.numel() // x.shape[0] if x.ndim and x.numel() else 1
    share = features**-0.5
    scale = scale if x.ndim else scale.reshape(())
    return _FakeQuantize.apply(x, scale, None, low - zero_point, high - zero_point, share)  # type: ignore[no-any-return]


@operator()
def fake_quantize_weight(
    weight: Tensor, scales: Tensor, offsets: Tensor | None = None, *, axis: int | None, low: int, high: int
) -> Tensor:
    """Quantize and dequantize a weight with a scale for each index along a dim, or a single one.

    ``offsets`` is the offset of each integer from the nearest one, in steps.
    """
    if axis is not None:
        scales = reshape_along_dim(scales, axis, weight.ndim)
    return _fake_quantize_scaled(weight, scales, offsets, low, high)


@operator()
def fake_quantize_rows(
    weight: Tensor, scales: Tensor, offsets: Tensor | None = None, *, has_rows: bool, low: int, high: int
) -> Tensor:
    """Quantize and dequantize a matrix with ``scales[outputs, blocks]``; outputs are its rows or its columns."""
    rows = weight if has_rows else weight.T
    parts = rows.reshape(*scales.shape, -1)
    steps = None if offsets is None else offsets.reshape(parts.shape)
    quantized = _fake_quantize_scaled(parts, scales.unsqueeze(-1), steps, low, high).reshape(rows.shape)
    return quantized if has_rows else quantized.T


@operator()
def fake_quantize_bias(bias: Tensor, input_scale: Tensor, scales: Tensor) -> Tensor:
    """Round a bias to INT32 and dequantize it; its scale is the input scale times the weight scale."""
    return _FakeQuantizeBias.apply(bias, input_scale * scales)  # type: ignore[no-any-return]


def _fake_quantize_scaled(weight: Tensor, scales: Tensor, offsets: Tensor | None, low: int, high: int) -> Tensor:
    share = max(weight.numel() // max(scales.numel(), 1), 1) ** -0.5
    return _FakeQuantize.apply(weight, scales, offsets, low, high, share)  # type: ignore[no-any-return]


class _FakeQuantize(torch.autograd.Function):
    """Rounding in float32, as in the simulation, whatever autocast does."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions are called by position
        ctx: Any, x: Tensor, scale: Tensor, offsets: Tensor | None, low: int, high: int, share: float
    ) -> Tensor:
        steps = (_upcast(x) / scale).round_().clamp_(low, high)
        if offsets is not None:
            steps = steps.add_(offsets).clamp_(low, high)
        quantized = steps.mul_(scale)
        ctx.save_for_backward(x, scale, quantized)
        ctx.limits, ctx.share = (low, high), share
        return quantized.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override] - the decorator hides argument names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, scale, quantized = ctx.saved_tensors
        low, high = ctx.limits
        (gradient,) = map(_upcast, gradients)
        steps = _upcast(x) / scale
        passed = torch.ops.aten.hardtanh_backward(gradient, steps, low - 0.5, high + 0.5)  # one pass without a mask
        of_scale = None
        if ctx.needs_input_grad[1]:  # held - x where not clipped, held elsewhere
            scale_gradient = (
                steps.mul_(passed).mul_(scale).addcmul_(gradient, quantized, value=-1)
            )  # large allocations are slow
            of_scale = scale_gradient.sum_to_size(scale.shape) / scale * -ctx.share
        return passed.to(x.dtype), of_scale, None, None, None, None


class _FakeQuantizeBias(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, scales: Tensor) -> Tensor:  # noqa: ARG004 - as PyTorch calls it
        steps = (bias.double() / scales.double()).round().clamp(-INT32_BIAS_LIMIT, INT32_BIAS_LIMIT)
        return (steps.float() * scales).to(bias.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        (gradient,) = gradients
        return gradient, None


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
