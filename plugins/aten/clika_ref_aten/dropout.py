"""Dropout and its variants: random zeros in training, the identity in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import Operator, operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref_aten.activation import SELU_ALPHA, SELU_SCALE, lower_leaky_relu
from clika_ref_aten.elementwise import FLOATS, unary_sampler
from clika_ref_aten.families import name_reference
from clika_ref_aten.randomness import draw_uniform
from clika_ref_aten.size_arithmetic import same_type

aten = torch.ops.aten

NEGATED_SELU_LIMIT = SELU_ALPHA * SELU_SCALE
"""The negated lower limit of selu; alpha dropout replaces an element by ``-ALPHA``."""


def draw_keep_mask(op, shape, p, dtype):
    """Draw a mask that is 0 with probability ``p``, else 1."""
    return op.cast(op.GreaterOrEqual(draw_uniform(op, shape, torch.float32), op.scalar(p, torch.float32)), dtype)


def per_channel_shape(shape):
    """Return the shape of a per-channel mask of ``x[n, c, ...]``."""
    return tuple(size if i < 2 else 1 for i, size in enumerate(shape))


def _scale_noise(op, x, noise, p):
    """Return ``x / (1 - p)`` where the noise is 1, and 0 where it is 0."""
    return op.Mul(x, op.Mul(noise, op.like(x, 1 / (1 - p))))


def _scale_and_shift_noise(op, x, noise, p):
    """Replace elements by -ALPHA where the noise is 0, then restore mean and variance.

    Source: Klambauer et al., section "New Dropout Technique".
    """
    a = 1 / ((NEGATED_SELU_LIMIT**2 * p + 1) * (1 - p)) ** 0.5
    shift = op.Mul(op.Sub(noise, op.like(x, 1 - p)), op.like(x, NEGATED_SELU_LIMIT * a))
    return op.Add(op.Mul(x, op.Mul(noise, op.like(x, a))), shift)


def _sampler(rank):
    return unary_sampler(rank=rank, dtype=FLOATS, attrs={"p": (0.5, 0.1, 0.0, 1.0), "train": (False, True)})


def _declare_dropout(name: str, doc: str, apply_noise: Callable[..., Any], *, per_channel: bool) -> Operator:
    """Declare a dropout that drops single elements, or whole channels of ``x[n, c, ...]``."""
    drop = getattr(torch, name)

    @operator(getattr(aten, name).default, quant=SHARED_QPARAMS, error=EXACT, random="train")
    @name_reference(name, doc)
    def reference(x: Tensor, *, p: float, train: bool) -> Tensor:
        return drop(x, p, train)

    @reference.onnx
    def _(op, x, *, p, train):
        if not train or p == 0:
            return x
        if p == 1:
            return op.Mul(x, op.like(x, 0))
        shape = per_channel_shape(op.shape(x)) if per_channel else op.shape(x)
        return apply_noise(op, x, draw_keep_mask(op, shape, p, op.dtype(x)), p)

    reference.types(same_type)
    reference.samples(_sampler((2, 5) if per_channel else (0, 5)))
    return reference


dropout = _declare_dropout(
    "dropout",
    "``x`` in evaluation; with ``train`` each element is 0 with probability ``p``, else ``x / (1 - p)``.",
    _scale_noise,
    per_channel=False,
)
feature_dropout = _declare_dropout(
    "feature_dropout",
    "Dropout of whole channels of ``x[n, c, ...]``; ``x`` itself in evaluation.",
    _scale_noise,
    per_channel=True,
)
alpha_dropout = _declare_dropout(
    "alpha_dropout",
    "Dropout that preserves the mean and variance of selu outputs; ``x`` itself in evaluation.",
    _scale_and_shift_noise,
    per_channel=False,
)
feature_alpha_dropout = _declare_dropout(
    "feature_alpha_dropout",
    "`alpha_dropout` of whole channels of ``x[n, c, ...]``; ``x`` itself in evaluation.",
    _scale_and_shift_noise,
    per_channel=True,
)


@operator(error=EXACT, random="train")
def native_dropout(x: Tensor, *, p: float, train: bool) -> tuple[Tensor, Tensor]:
    """`dropout`, and the boolean mask of the kept elements."""
    result, mask = torch.native_dropout(x, p, train)
    return result, mask.to(torch.bool)  # for an empty x, eager's mask has the dtype of x


@native_dropout.onnx
def _(op, x, *, p, train):
    shape = op.shape(x)
    if not train or p == 0:
        return x, op.Expand(op.scalar(True, torch.bool), op.ints(shape))
    if p == 1:
        return op.Mul(x, op.like(x, 0)), op.Expand(op.scalar(False, torch.bool), op.ints(shape))
    mask = draw_keep_mask(op, shape, p, torch.bool)
    return _scale_noise(op, x, op.cast(mask, op.dtype(x)), p), mask


native_dropout.samples(_sampler((0, 5)))


@native_dropout.from_torch(aten.native_dropout.default)
def _(x, p, train):
    return native_dropout.call(x, p=p, train=train is not False)  # None means training


@operator(aten.rrelu.default, error=EXACT, random="training")
def rrelu(x: Tensor, *, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    """``x`` where positive, else ``slope * x``, elementwise.

    With ``training``, the slopes are random in ``[lower, upper]``; otherwise the slope is the mean of the two.
    """
    return torch.rrelu(x, lower, upper, training)


@rrelu.onnx
def _(op, x, *, lower, upper, training):
    if not training:
        return lower_leaky_relu(op, x, (lower + upper) / 2)
    share = draw_uniform(op, op.shape(x), op.dtype(x))
    slope = op.Add(op.Mul(share, op.like(x, upper - lower)), op.like(x, lower))
    return op.Where(op.Greater(x, op.like(x, 0)), x, op.Mul(x, slope))


rrelu.samples(
    unary_sampler(dtype=FLOATS[::2], attrs={"lower": (1 / 8, 0.2), "upper": (1 / 3, 0.9), "training": (False, True)})
)
