"""Losses that compare two tensors elementwise."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import operator
from clika_ref_aten.elementwise import FLOATS
from clika_ref_aten.exponential import lower_log1p
from clika_ref_aten.gating import stable_softplus
from clika_ref_aten.reduction import is_nonempty

aten = torch.ops.aten

REDUCE_NONE, REDUCE_MEAN, REDUCE_SUM = 0, 1, 2  # ATen's numbering of the reductions


def reduce_losses(op, losses, reduction, weight=None):
    """Reduce losses, times ``weight`` if given, to their mean or sum over all elements, or return all of them."""
    if weight is not None:
        losses = op.Mul(losses, op.cast(weight, op.dtype(losses)))
    if reduction == REDUCE_NONE:
        return losses
    return op.ReduceMean(losses, keepdims=0) if reduction == REDUCE_MEAN else op.ReduceSum(losses, keepdims=0)


def handle_empty_mean(lowering):
    """Wrap the lowering of a loss so that the mean of no elements is NaN, where runtimes return 0.

    If the number of elements is symbolic, the mean is divided by 0 where it is 0, otherwise by 1.
    """

    @functools.wraps(lowering)
    def lower(op, *operands, reduction, **attrs):
        counts = (
            dict.fromkeys(math.prod(op.shape(o)) for o in operands if o is not None) if reduction == REDUCE_MEAN else ()
        )
        if 0 in counts:
            return op.scalar(math.nan, op.result.dtype)
        loss = lowering(op, *operands, reduction=reduction, **attrs)
        for count in filter(op.sizes.may_be_zero, counts):
            loss = op.Div(loss, op.cast(is_nonempty(op, count), op.result.dtype))
        return loss

    return lower


def draw_reduction(draw, s):
    """Draw one of ATen's reductions."""
    return draw(s.choice(REDUCE_MEAN, REDUCE_NONE, REDUCE_SUM))


def is_equal_to(op, x, number):
    """Return a mask of the elements equal to ``number``."""
    return op.Equal(x, op.like(x, number))


def draw_pair(draw, s, *, is_mixed=False, **target):
    """Draw an input and a target that may broadcast, of one dtype unless ``is_mixed``."""
    x = draw(s.tensor(rank=draw(s.choice(2, 3, 1, 0)), dtype=FLOATS))
    shape = x.shape if draw(s.booleans()) else x.shape[1:]
    dtype = draw(s.choice(x.dtype, torch.float64, torch.int64)) if is_mixed else x.dtype
    return x, draw(s.tensor(shape=shape, dtype=dtype, **target))


def _pair_sampler(*, is_mixed=False, attrs=None, **target):
    """Return a sampler for a loss of an input and a target, from `draw_pair`; ``attrs`` lists values to draw."""

    def sample(draw, s):
        operands, reduction = draw_pair(draw, s, is_mixed=is_mixed, **target), draw_reduction(draw, s)
        chosen = {name: draw(s.choice(*values)) for name, values in (attrs or {}).items()}
        return s.call(*operands, reduction=reduction, **chosen)

    return sample


@operator(aten.mse_loss.default, error=COMPOSE)
def mse_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN) -> Tensor:
    """``(x - target) ** 2``, elementwise, then its mean or sum."""
    return aten.mse_loss.default(x, target, reduction)


@mse_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction):
    difference = op.Sub(*op.promote(x, target))
    return reduce_losses(op, op.Mul(difference, difference), reduction)


mse_loss.samples(_pair_sampler())


@operator(aten.l1_loss.default, error=COMPOSE)
def l1_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN) -> Tensor:
    """``|x - target|``, elementwise, then its mean or sum."""
    return aten.l1_loss.default(x, target, reduction)


@l1_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction):
    return reduce_losses(op, op.Abs(op.Sub(*op.promote(x, target))), reduction)


l1_loss.samples(_pair_sampler())


@operator(aten.smooth_l1_loss.default, error=COMPOSE)
def smooth_l1_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN, beta: float = 1.0) -> Tensor:
    """``d ** 2 / (2 beta)`` where ``d = |x - target|`` is below ``beta``, else ``d - beta / 2``, then mean or sum."""
    return aten.smooth_l1_loss.default(x, target, reduction, beta)


@smooth_l1_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction, beta):
    d = op.Abs(op.Sub(*op.promote(x, target)))
    if beta == 0:
        return reduce_losses(op, d, reduction)
    square = op.Div(op.Mul(op.Mul(d, op.like(d, 0.5)), d), op.like(d, beta))
    bent = op.Where(op.Less(d, op.like(d, beta)), square, op.Sub(d, op.like(d, beta / 2)))
    return reduce_losses(op, bent, reduction)


smooth_l1_loss.samples(_pair_sampler(attrs={"beta": (1.0, 0.0, 2.5)}))


@operator(aten.huber_loss.default, error=COMPOSE)
def huber_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN, delta: float = 1.0) -> Tensor:
    """``d ** 2 / 2`` where ``d = |x - target|`` is up to ``delta``, else ``delta * (d - delta / 2)``, mean or sum."""
    return aten.huber_loss.default(x, target, reduction, delta).to(x.dtype)  # meta tensors promote it


@huber_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction, delta):
    d = op.Abs(op.Sub(*op.promote(x, target)))
    square = op.Mul(op.Mul(d, op.like(d, 0.5)), d)
    line = op.Mul(op.Sub(d, op.like(d, delta / 2)), op.like(d, delta))
    return reduce_losses(op, op.Where(op.LessOrEqual(d, op.like(d, delta)), square, line), reduction)


huber_loss.samples(_pair_sampler(is_mixed=True, attrs={"delta": (1.0, 0.4, 2.5)}))


@operator(aten.binary_cross_entropy.default, error=COMPOSE)
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: int = REDUCE_MEAN
) -> Tensor:
    """``-weight * (target * log(x) + (1 - target) * log(1 - x))``, logarithms at least -100, then mean or sum."""
    return aten.binary_cross_entropy.default(x, target, weight, reduction).to(x.dtype)  # likewise


@binary_cross_entropy.onnx
@handle_empty_mean
def _(op, x, target, weight, *, reduction):
    x, target = op.promote(x, target)
    one, lowest = op.like(x, 1), op.like(x, -100)
    wrong = op.Mul(op.Sub(target, one), op.Max(lower_log1p(op, op.Neg(x)), lowest))
    losses = op.Sub(wrong, op.Mul(target, op.Max(op.Log(x), lowest)))
    return reduce_losses(op, losses, reduction, weight)


@binary_cross_entropy.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS, low=0.01, high=0.99, domain=(0, 1)))
    target = draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0, high=1, domain=(0, 1)))
    weight = draw(s.tensor(shape=x.shape[1:], dtype=x.dtype)) if draw(s.booleans()) else None
    return s.call(x, target, weight, reduction=draw_reduction(draw, s))


@operator(aten.binary_cross_entropy_with_logits.default, error=COMPOSE)
def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    *,
    reduction: int = REDUCE_MEAN,
) -> Tensor:
    """``binary_cross_entropy(sigmoid(x), target)``, the positive term weighted by ``pos_weight``, then mean or sum."""
    return aten.binary_cross_entropy_with_logits.default(x, target, weight, pos_weight, reduction)


@binary_cross_entropy_with_logits.onnx
@handle_empty_mean
def _(op, x, target, weight, pos_weight, *, reduction):
    x, target = op.promote(x, target)
    one, cost = op.like(x, 1), stable_softplus(op, op.Neg(x))
    if pos_weight is not None:
        extra = op.Mul(op.Sub(op.cast(pos_weight, op.dtype(x)), one), target)
        cost = op.Mul(op.Add(extra, one), cost)
    losses = op.Add(op.Mul(op.Sub(one, target), x), cost)
    return reduce_losses(op, losses, reduction, weight)


@binary_cross_entropy_with_logits.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS, low=-8, high=8))
    target = draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0, high=1))
    weight = draw(s.tensor(shape=x.shape[1:], dtype=x.dtype)) if draw(s.booleans()) else None
    positive = draw(s.tensor(shape=x.shape[-1:], dtype=x.dtype, low=0.1)) if draw(s.booleans()) else None
    return s.call(x, target, weight, positive, reduction=draw_reduction(draw, s))


@operator(aten.kl_div.default, error=COMPOSE)
def kl_div(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN, log_target: bool = False) -> Tensor:
    """``target * (log(target) - x)``, elementwise, then mean or sum; ``log_target``: the target is a logarithm."""
    return aten.kl_div.default(x, target, reduction, log_target=log_target)


@kl_div.onnx
@handle_empty_mean
def _(op, x, target, *, reduction, log_target):
    x, target = op.promote(x, target)
    if log_target:
        return reduce_losses(op, op.Mul(op.Exp(target), op.Sub(target, x)), reduction)
    entropy = op.Where(is_equal_to(op, target, 0), target, op.Mul(target, op.Log(target)))  # 0 log 0 is 0
    return reduce_losses(op, op.Sub(entropy, op.Mul(target, x)), reduction)


kl_div.samples(_pair_sampler(low=0, high=1, domain=(0, 1), attrs={"log_target": (False, True)}))


@operator(aten.soft_margin_loss.default, error=COMPOSE)
def soft_margin_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN) -> Tensor:
    """``log(1 + exp(-target * x))``, elementwise, then its mean or sum."""
    return aten.soft_margin_loss.default(x, target, reduction).to(x.dtype)  # likewise


@soft_margin_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction):
    x, target = op.promote(x, target)
    power = op.Exp(op.Mul(op.Neg(target), x))  # not Softplus: eager overflows too
    return reduce_losses(op, lower_log1p(op, power), reduction)


soft_margin_loss.samples(_pair_sampler(is_mixed=True, low=-1, high=1))


@operator(aten.poisson_nll_loss.default, error=COMPOSE)
def poisson_nll_loss(x: Tensor, target: Tensor, *, log_input: bool, full: bool, eps: float, reduction: int) -> Tensor:
    """``exp(x) - target * x``, or ``x - target * log(x + eps)`` without ``log_input``, then mean or sum.

    ``full`` adds Stirling's ``target * log(target) - target + log(2 pi target) / 2`` where ``target > 1``.
    """
    return aten.poisson_nll_loss.default(x, target, log_input, full, eps, reduction)


@poisson_nll_loss.onnx
@handle_empty_mean
def _(op, x, target, *, log_input, full, eps, reduction):
    x, target = op.promote(x, target)
    if log_input:
        losses = op.Sub(op.Exp(x), op.Mul(target, x))
    else:
        losses = op.Sub(x, op.Mul(target, op.Log(op.Add(x, op.like(x, eps)))))
    if full:
        half_log = op.Mul(op.Log(op.Mul(target, op.like(x, 2 * math.pi))), op.like(x, 0.5))
        stirling = op.Add(op.Sub(op.Mul(target, op.Log(target)), target), half_log)
        small = op.LessOrEqual(target, op.like(x, 1))
        losses = op.Add(losses, op.Where(small, op.like(x, 0), stirling))
    return reduce_losses(op, losses, reduction)


@poisson_nll_loss.samples
def _(draw, s):
    log_input = draw(s.booleans())
    low, domain = (-3.0, None) if log_input else (0.1, (0, math.inf))
    x = draw(s.tensor(dtype=FLOATS, low=low, high=3, domain=domain))
    return s.call(
        x,
        draw(s.tensor(shape=x.shape, dtype=x.dtype, low=0, high=5, domain=(0, math.inf))),
        log_input=log_input,
        full=draw(s.booleans()),
        eps=draw(s.choice(1e-8, 1e-3)),
        reduction=draw_reduction(draw, s),
    )


@operator(aten.margin_ranking_loss.default, error=COMPOSE)
def margin_ranking_loss(
    x1: Tensor, x2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: int = REDUCE_MEAN
) -> Tensor:
    """``max(margin - target * (x1 - x2), 0)``, elementwise, then its mean or sum."""
    return aten.margin_ranking_loss.default(x1, x2, target, margin, reduction)


@margin_ranking_loss.onnx
@handle_empty_mean
def _(op, x1, x2, target, *, margin, reduction):
    x1, x2, target = op.promote(x1, x2, target)
    lead = op.Mul(op.Neg(target), op.Sub(x1, x2))
    return reduce_losses(op, op.Relu(op.Add(lead, op.like(lead, margin))), reduction)


@margin_ranking_loss.samples
def _(draw, s):
    x1, x2 = draw_pair(draw, s)
    target = draw(s.tensor(shape=x1.shape, dtype=x1.dtype, low=-1, high=1))
    return s.call(x1, x2, target, margin=draw(s.choice(0.0, 0.5)), reduction=draw_reduction(draw, s))


@operator(aten.hinge_embedding_loss.default, error=COMPOSE)
def hinge_embedding_loss(x: Tensor, target: Tensor, *, margin: float = 1.0, reduction: int = REDUCE_MEAN) -> Tensor:
    """``x`` where ``target`` is not -1, plus ``max(margin - x, 0)`` where it is not 1, then the mean or sum."""
    return aten.hinge_embedding_loss.default(x, target, margin, reduction)


@hinge_embedding_loss.onnx
@handle_empty_mean
def _(op, x, target, *, margin, reduction):
    x, target = op.promote(x, target)
    far = op.Relu(op.Sub(op.like(x, margin), x))
    zero = op.like(x, 0)
    apart = op.Where(is_equal_to(op, target, 1), zero, far)
    return reduce_losses(op, op.Add(apart, op.Where(is_equal_to(op, target, -1), zero, x)), reduction)


@hinge_embedding_loss.samples
def _(draw, s):
    x = draw(s.tensor(dtype=FLOATS))
    target = draw(s.tensor(shape=x.shape, dtype=torch.int64, low=-1, high=1))
    return s.call(x, target, margin=draw(s.choice(1.0, 0.5)), reduction=draw_reduction(draw, s))
