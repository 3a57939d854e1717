"""Batch norm folding: a batch norm as a function of the weights of the layer before it, and of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ELEMENTS_PER_PART = 2**18
"""Number of elements multiplied at a time: 2 MB in float64, which fits into a cache."""


def norm_scale(gamma: Tensor | None, var: Tensor, *, eps: float) -> Tensor:
    """Return the multiplier of a batch norm for each channel, ``gamma / sqrt(var + eps)``: ``float64[channels]``."""
    root = torch.rsqrt(var.double() + eps)
    return root if gamma is None else gamma.double() * root


def fold_weight(weight: Tensor, gamma: Tensor | None, var: Tensor, *, eps: float, groups: int | None = None) -> Tensor:
    """Return a weight with the multiplier of the following batch norm; computed in float64 and rounded once.

    Args:
        weight: ``[channels, ...]``; for a transposed convolution ``[inputs, channels / groups, ...]``.
        gamma: ``[channels]``; None for ones.
        var: ``[channels]``, the running variance.
        eps: of the norm.
        groups: of a transposed convolution; None for any other layer.
    """
    scale = norm_scale(gamma, var, eps=eps)
    if groups is None:
        return _scale_weight(weight, scale.reshape(-1, *[1] * (weight.dim() - 1)))
    grouped = weight.unflatten(0, (groups, -1))  # channel g * (k / groups) + j is [g, :, j]
    return _scale_weight(grouped, scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).flatten(0, 1)


def fold_bias(
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``(bias - mean) * gamma / sqrt(var + eps) + beta``, computed in float64: ``dtype[channels]``."""
    centred = -mean.double() if bias is None else bias.double() - mean.double()
    shift = centred * norm_scale(gamma, var, eps=eps)
    return (shift if beta is None else shift + beta.double()).to(dtype)


def _scale_weight(weight: Tensor, factors: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler fuses this into one loop
        return (weight * factors).to(weight.dtype)
    return _ScaleWeight.apply(weight, factors)  # type: ignore[no-any-return]


class _ScaleWeight(torch.autograd.Function):
    """A product with factors of a wider dtype, rounded once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(weight, factors)
        return scale_in_parts(weight, factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, factors = ctx.saved_tensors
        (gradient,) = gradients
        wants = ctx.needs_input_grad
        of_factors = (gradient * weight).sum_to_size(factors.shape).to(factors.dtype) if wants[1] else None
        return gradient * factors.to(gradient.dtype) if wants[0] else None, of_factors


def scale_in_parts(weight: Tensor, factors: Tensor) -> Tensor:
    """Return the product, computed in the wider dtype of the factors and rounded once, a part at a time.

    PyTorch copies whatever it multiplies to the wider dtype.
    """
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    rows = max(1, ELEMENTS_PER_PART // max(1, weight[:1].numel()))
    for part in range(0, len(weight), rows):
        some = slice(part, part + rows)
        torch.mul(weight[some], factors[some], out=result[some])
    return result
