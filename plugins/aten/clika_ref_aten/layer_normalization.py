"""Layer and RMS normalization over the last dims."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import NORM
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import own_qparams_scaled_by
from clika_ref_aten.elementwise import FLOATS
from clika_ref_aten.normalization import (
    EPSILONS,
    apply_affine,
    compute_statistics,
    divide_by_deviation,
    fill_if_none,
    promote_to_float32,
    promote_together,
)

aten = torch.ops.aten


def _samples(*, with_bias):
    def sampler(draw, s):
        magnitude = draw(s.choice(3.0, 0.01))  # small values reveal where eps is added
        x = draw(s.tensor(rank=(1, 5), dtype=FLOATS, low=-magnitude, high=magnitude))
        normalized_shape = x.shape[-draw(s.integers(1, x.rank)) :]
        operands = [draw(s.tensor(shape=normalized_shape, dtype=x.dtype)) if draw(s.booleans()) else None]
        if with_bias:
            operands.append(draw(s.tensor(shape=normalized_shape, dtype=x.dtype)) if draw(s.booleans()) else None)
        epsilons = EPSILONS if with_bias else (None, 0.1)
        return s.call(x, *operands, normalized_shape=normalized_shape, eps=draw(s.choice(*epsilons)))

    return sampler


@operator(aten.layer_norm.default, quant=own_qparams_scaled_by(1, 2), error=NORM)
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dims, of shape ``normalized_shape``."""
    return torch.layer_norm(x, normalized_shape, weight, bias, eps, torch.backends.cudnn.enabled)


@layer_norm.onnx
def _(op, x, weight, bias, *, normalized_shape, eps):
    if 0 in op.shape(x):
        return op.Identity(x)
    axes = _last_axes(op, x, normalized_shape)
    x, weight, bias = promote_together(op, x, weight, bias)
    if op.dtype(x) == torch.float64 or is_symbolic(tuple(normalized_shape)):  # ONNX Runtime rejects size 0
        result, _, _ = _normalize_by_primitives(op, x, weight, bias, axes=axes, eps=eps)
    else:
        weight = fill_if_none(op, weight, x, 1, *normalized_shape)
        result = op.LayerNormalization(x, weight, bias, axis=-len(normalized_shape), epsilon=float(eps))
    return op.cast(result, op.result.dtype)


layer_norm.samples(_samples(with_bias=True))


def _last_axes(op, x, normalized_shape):
    rank = op.rank(x)
    return list(range(rank - len(normalized_shape), rank))


def _normalize_by_primitives(op, x, weight, bias, *, axes, eps):
    centred, mean, variance = compute_statistics(op, x, axes)
    deviation = op.Sqrt(op.Add(variance, op.like(variance, eps)))
    return apply_affine(op, op.Div(centred, deviation), weight, bias), mean, op.Reciprocal(deviation)


@operator(aten.native_layer_norm.default, quant=own_qparams_scaled_by(1, 2), error=NORM)
def native_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `layer_norm`, the mean, and ``1 / sqrt(var + eps)``; the last two in at least float32.

    Where the variance is NaN, the mean is too.
    """
    result, mean, rstd = torch.native_layer_norm(x, normalized_shape, weight, bias, eps)
    mean = torch.where(rstd.isnan(), rstd, mean)  # eager's mean of infinities is infinite or NaN by their order
    wide = torch.promote_types(x.dtype, torch.float32)  # float32 on a GPU, but the dtype of x on a CPU
    return result, mean.to(wide), rstd.to(wide)


@native_layer_norm.onnx
def _(op, x, weight, bias, *, normalized_shape, eps):
    if 0 in op.shape(x):
        return op.Identity(x), *_empty_statistics(op)
    axes = _last_axes(op, x, normalized_shape)
    result, mean, rstd = _normalize_by_primitives(op, *promote_to_float32(op, x, weight, bias), axes=axes, eps=eps)
    if is_symbolic(tuple(normalized_shape)):  # 0 / 0 for tensors that are empty at run time
        some = op.cast(op.cast(op.scalar(math.prod(normalized_shape), torch.int64), torch.bool), op.dtype(rstd))
        rstd = op.Mul(rstd, op.Div(some, some))
    parts = result, op.Where(op.IsNaN(rstd), rstd, mean), rstd
    return tuple(op.cast(part, result.dtype) for part, result in zip(parts, op.results, strict=True))


def _empty_statistics(op):
    _, mean, rstd = op.results
    return (op.Expand(op.scalar(math.nan, t.dtype), op.ints(t.shape)) for t in (mean, rstd))


native_layer_norm.samples(_samples(with_bias=True))


@operator(aten.rms_norm.default, quant=own_qparams_scaled_by(1), error=NORM)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, normalized_shape: tuple[int, ...], eps: float | None = None
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dims; ``eps`` defaults to that of the dtype."""
    return torch.rms_norm(x, normalized_shape, weight, eps)


@rms_norm.onnx
def _(op, x, weight, *, normalized_shape, eps):
    if 0 in op.shape(x):  # ONNX Runtime 1.31's fused kernel rejects empty rows
        return op.Identity(op.cast(x, op.result.dtype))
    x, weight = promote_to_float32(op, x, weight)
    eps = torch.finfo(op.dtype(x)).eps if eps is None else eps
    axes = op.ints(range(-len(normalized_shape), 0))
    # ONNX Runtime fuses Pow, not Mul. Its fused kernel rejects dims of size 0, and reads the bytes of eps as float32.
    is_fused = op.dtype(x) != torch.float64 and not is_symbolic(tuple(normalized_shape))
    powers = op.Pow(x, op.like(x, 2)) if is_fused else op.Mul(x, x)
    square = op.ReduceMean(powers, axes, keepdims=1)
    return op.cast(apply_affine(op, divide_by_deviation(op, x, square, eps), weight, None), op.result.dtype)


rms_norm.samples(_samples(with_bias=False))
