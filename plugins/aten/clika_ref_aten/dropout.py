"""Dropout and its variants: random zeros in training, the identity in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref_aten.activation import FLOATS, SELU_ALPHA, SELU_SCALE, first_operand_type, lower_leaky_relu
from clika_ref_aten.randomness import uniform_of_shape

aten = torch.ops.aten

NEGATED_SELU_LIMIT = SELU_ALPHA * SELU_SCALE
"""The negated lower limit of selu; alpha dropout replaces an element by ``-ALPHA``."""


def draw_keep_mask(op, shape, p, dtype):
    """Draw a mask that is 0 with probability ``p``, else 1."""
    return op.cast(op.GreaterOrEqual(uniform_of_shape(op, shape, torch.float32), op.scalar(p, torch.float32)), dtype)


def per_channel_shape(shape):
    """Return the shape of a per-channel mask of ``x[n, c, ...]``."""
    return tuple(side if i < 2 else 1 for i, side in enumerate(shape))


def _samples(*, rank):
    def sampler(draw, s):
        x = draw(s.tensor(rank=rank, dtype=FLOATS))
        return s.call(x, p=draw(s.choice(0.5, 0.1, 0.0, 1.0)), train=draw(s.booleans()))

    return sampler


def _dropout_lowering(shape_of_noise):
    """Return the lowering of dropout: a product with noise that is 0 or ``1 / (1 - p)``."""

    def lowering(op, x, *, p, train):
        if not train or p == 0:
            return x
        if p == 1:
            return op.Mul(x, op.like(x, 0))
        noise = draw_keep_mask(op, shape_of_noise(op.shape(x)), p, op.dtype(x))
        return op.Mul(x, op.Mul(noise, op.like(x, 1 / (1 - p))))

    return lowering


def _alpha_dropout_lowering(shape_of_noise):
    """Return the lowering of alpha dropout: dropped elements become -ALPHA, then mean and variance are restored."""

    def lowering(op, x, *, p, train):
        if not train or p == 0:
            return x
        if p == 1:
            return op.Mul(x, op.like(x, 0))
        noise = draw_keep_mask(op, shape_of_noise(op.shape(x)), p, op.dtype(x))
        a = (
            1 / ((NEGATED_SELU_LIMIT**2 * p + 1) * (1 - p)) ** 0.5
        )  # Source: Klambauer et al., section "New Dropout Technique"
        shift = op.Mul(op.Sub(noise, op.like(x, 1 - p)), op.like(x, NEGATED_SELU_LIMIT * a))
        return op.Add(op.Mul(x, op.Mul(noise, op.like(x, a))), shift)

    return lowering


@operator(aten.dropout.default, quant=SHARED_QPARAMS, error=EXACT, random="train")
def dropout(x: Tensor, *, p: float, train: bool) -> Tensor:
    """``x`` in evaluation; with ``train`` each element is 0 with probability ``p``, else ``x / (1 - p)``."""
    return torch.dropout(x, p, train)


dropout.onnx(_dropout_lowering(tuple))
dropout.types(first_operand_type)
dropout.samples(_samples(rank=(0, 5)))


@operator(aten.feature_dropout.default, quant=SHARED_QPARAMS, error=EXACT, random="train")
def feature_dropout(x: Tensor, *, p: float, train: bool) -> Tensor:
    """Dropout of whole channels of ``x[n, c, ...]``; ``x`` itself in evaluation."""
    return torch.feature_dropout(x, p, train)


feature_dropout.onnx(_dropout_lowering(per_channel_shape))
feature_dropout.types(first_operand_type)
feature_dropout.samples(_samples(rank=(2, 5)))


@operator(aten.alpha_dropout.default, quant=SHARED_QPARAMS, error=EXACT, random="train")
def alpha_dropout(x: Tensor, *, p: float, train: bool) -> Tensor:
    """Dropout that preserves the mean and variance of selu outputs; ``x`` itself in evaluation."""
    return torch.alpha_dropout(x, p, train)


alpha_dropout.onnx(_alpha_dropout_lowering(tuple))
alpha_dropout.types(first_operand_type)
alpha_dropout.samples(_samples(rank=(0, 5)))


@operator(aten.feature_alpha_dropout.default, quant=SHARED_QPARAMS, error=EXACT, random="train")
def feature_alpha_dropout(x: Tensor, *, p: float, train: bool) -> Tensor:
    """`alpha_dropout` of whole channels of ``x[n, c, ...]``; ``x`` itself in evaluation."""
    return torch.feature_alpha_dropout(x, p, train)


feature_alpha_dropout.onnx(_alpha_dropout_lowering(per_channel_shape))
feature_alpha_dropout.types(first_operand_type)
feature_alpha_dropout.samples(_samples(rank=(2, 5)))


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
    return op.Mul(x, op.Mul(op.cast(mask, op.dtype(x)), op.like(x, 1 / (1 - p)))), mask


native_dropout.samples(_samples(rank=(0, 5)))


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
    share = uniform_of_shape(op, op.shape(x), op.dtype(x))
    slope = op.Add(op.Mul(share, op.like(x, upper - lower)), op.like(x, lower))
    return op.Where(op.Greater(x, op.like(x, 0)), x, op.Mul(x, slope))


@rrelu.samples
def _(draw, s):
    return s.call(
        draw(s.tensor(dtype=FLOATS[::2])),
        lower=draw(s.choice(1 / 8, 0.2)),
        upper=draw(s.choice(1 / 3, 0.9)),
        training=draw(s.booleans()),
    )
