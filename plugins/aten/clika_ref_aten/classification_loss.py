"""Classification losses, which compare class scores with a target class."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType
from clika_ref_aten.elementwise import FLOATS, reshape_per_channel
from clika_ref_aten.indexing import as_vector
from clika_ref_aten.loss import REDUCE_MEAN, REDUCE_NONE, REDUCE_SUM, draw_reduction, handle_empty_mean, reduce_losses
from clika_ref_aten.reduction import mean_of

aten = torch.ops.aten


def _drop_class_dim(x):
    """Return the shape of ``x[n, c, ...]`` or ``x[c]`` without the class dim."""
    return x.shape[:1] + x.shape[2:] if x.rank > 1 else ()


def _loss_type(x, *_, reduction, **__):
    return TensorType(x.dtype, _drop_class_dim(x) if reduction == REDUCE_NONE else ())


def _fix_empty_loss(loss, x, reduction):
    """Return the loss; for an empty ``x`` NaN or 0, like other losses, where eager returns uninitialized memory."""
    if x.numel() or reduction == REDUCE_NONE:
        return loss
    return torch.full_like(loss, math.nan if reduction == REDUCE_MEAN else 0.0)


def _class_axis(op, x):
    return 1 if op.rank(x) > 1 else 0


def _require_classes(x):
    """Reject scores of 0 classes: eager returns 0, NaN or an error, depending on the reduction and the target dtype."""
    if not x.shape[min(x.ndim - 1, 1)]:
        raise ValueError(f"scores of the shape {list(x.shape)} have no classes")


class _TargetSelector:
    """Select the scores of the target classes from ``x[n, c, ...]``, and mask targets equal to ``ignore_index``."""

    def __init__(self, op, x, target, ignore_index) -> None:
        target = op.cast(target, torch.int64)
        self.op, self.axis, self.rank = op, _class_axis(op, x), op.rank(x)
        self.counts = op.Not(op.Equal(target, op.scalar(ignore_index, torch.int64)))
        self.classes = op.Where(self.counts, target, op.scalar(0, torch.int64))
        self.zero = op.like(x, 0)

    def pick(self, scores):
        """Return the score of each target class."""
        op, axis = self.op, self.op.ints([self.axis])
        index = op.Reshape(self.classes, op.ints([1])) if self.rank == 1 else op.Unsqueeze(self.classes, axis)
        picked = op.GatherElements(scores, index, axis=self.axis)
        return op.Reshape(picked, op.ints([])) if self.rank == 1 else op.Squeeze(picked, axis)

    def keep(self, losses):
        """Return the losses, with 0 where the target is ignored."""
        return self.op.Where(self.counts, losses, self.zero)

    def weights(self, weight):
        """Return the weight of each target class: 0 where it is ignored, 1 if no weights are given."""
        op = self.op
        if weight is None:
            return op.cast(self.counts, op.dtype(self.zero))
        return self.keep(op.Gather(op.cast(weight, op.dtype(self.zero)), self.classes, axis=0))


def _mean_by_weight(op, losses, weights):
    return op.Div(op.ReduceSum(losses, keepdims=0), op.ReduceSum(weights, keepdims=0))


def _draw_classification(draw, s, **scores):
    """Draw scores ``x[n, c, ...]`` or ``x[c]``, targets, class weights and an ``ignore_index``."""
    classes = draw(s.integers(2, 5))
    shape = list(draw(s.tensor(rank=(1, 5), size=(1, 4))).shape)
    shape[1 if len(shape) > 1 else 0] = classes
    x = draw(s.tensor(shape=shape, dtype=FLOATS, **scores))
    target = draw(
        s.tensor(shape=_drop_class_dim(x), dtype=torch.int64, low=0, high=classes - 1, domain=(0, classes - 1))
    )
    weight = draw(s.tensor(shape=(classes,), dtype=x.dtype, low=0.1)) if draw(s.booleans()) else None
    return x, target, weight, draw(s.choice(-100, 0, 1))


@operator(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default, error=COMPOSE)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: int = REDUCE_MEAN, ignore_index: int = -100
) -> Tensor:
    """``-weight[t] * x[n, t, ...]`` for the class ``t = target[n, ...]``, then the sum or the weighted mean.

    Targets equal to ``ignore_index`` do not count.
    """
    _require_classes(x)
    return aten.nll_loss_nd.default(x, target, weight, reduction, ignore_index)


@nll_loss.onnx
def _(op, x, target, weight, *, reduction, ignore_index):
    picker = _TargetSelector(op, x, target, ignore_index)
    return _lower_nll(op, picker, x, weight, reduction=reduction)


def _lower_nll(op, picker, x, weight, *, reduction):
    losses = op.Neg(picker.pick(x))
    weights = picker.weights(weight)
    losses = picker.keep(losses if weight is None else op.Mul(losses, weights))
    return _mean_by_weight(op, losses, weights) if reduction == REDUCE_MEAN else reduce_losses(op, losses, reduction)


nll_loss.types(_loss_type)


@nll_loss.samples
def _(draw, s):
    x, target, weight, ignore_index = _draw_classification(draw, s, low=-5, high=0)
    return s.call(x, target, weight, reduction=draw_reduction(draw, s), ignore_index=ignore_index)


@operator(aten.cross_entropy_loss.default, error=COMPOSE)
def cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: int = REDUCE_MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`nll_loss` of the log-softmax of ``x`` over classes; float targets are class probabilities.

    ``label_smoothing`` is the share of the target that is spread evenly over all classes.
    """
    _require_classes(x)
    return aten.cross_entropy_loss.default(x, target, weight, reduction, ignore_index, label_smoothing)


@cross_entropy_loss.onnx
def _(op, x, target, weight, *, reduction, ignore_index, label_smoothing):
    axis = _class_axis(op, x)
    logs = op.LogSoftmax(x, axis=axis)
    share = op.Div(op.like(x, label_smoothing), op.scalar(op.shape(x)[axis], op.dtype(x)))
    keep = op.like(x, 1 - label_smoothing)
    if op.dtype(target).is_floating_point:
        if label_smoothing:
            target = op.Add(op.Mul(target, op.like(target, 1 - label_smoothing)), op.cast(share, op.dtype(target)))
        logs, target = op.promote(logs, target)
        weight = None if weight is None else op.cast(weight, op.result.dtype)
    weighted = logs if weight is None else op.Mul(logs, reshape_per_channel(op, weight, op.rank(x)))
    if op.dtype(target).is_floating_point:
        losses = op.Neg(op.ReduceSum(op.Mul(weighted, target), op.ints([axis]), keepdims=0))
        count = math.prod(size for i, size in enumerate(op.shape(x)) if i != axis)
        return (
            mean_of(op, losses, count, None, keepdims=0)
            if reduction == REDUCE_MEAN
            else reduce_losses(op, losses, reduction)
        )
    picker = _TargetSelector(op, x, target, ignore_index)
    likelihood = _lower_nll(op, picker, logs, weight, reduction=reduction)
    if not label_smoothing:
        return likelihood
    smooth = picker.keep(op.Neg(op.ReduceSum(weighted, op.ints([axis]), keepdims=0)))
    if reduction == REDUCE_MEAN:
        smooth = _mean_by_weight(op, smooth, picker.weights(weight))
    elif reduction == REDUCE_SUM:
        smooth = reduce_losses(op, smooth, REDUCE_SUM)
    return op.Add(op.Mul(likelihood, keep), op.Mul(smooth, share))


@cross_entropy_loss.types
def _(x, target, weight, *, reduction, **_):
    type_ = _loss_type(x, reduction=reduction)
    if not target.dtype.is_floating_point:
        return type_
    factors = [t.dtype for t in (x, target, weight) if t is not None]
    return replace(type_, dtype=functools.reduce(torch.promote_types, factors))


@cross_entropy_loss.samples
def _(draw, s):
    x, target, weight, ignore_index = _draw_classification(draw, s, low=-5, high=5)
    if draw(s.choice(False, False, True)):
        dtype = draw(s.choice(x.dtype, torch.float64))
        target = draw(s.tensor(shape=x.shape, dtype=dtype, low=0, high=1))
        ignore_index = -100
    return s.call(
        x,
        target,
        weight,
        reduction=draw_reduction(draw, s),
        ignore_index=ignore_index,
        label_smoothing=draw(s.choice(0.0, 0.1, 0.3, 0.5)),
    )


@operator(aten.multi_margin_loss.default, error=COMPOSE)
def multi_margin_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    p: int = 1,
    margin: float = 1.0,
    reduction: int = REDUCE_MEAN,
) -> Tensor:
    """``sum over c != t of weight[t] * max(margin - x[n, t] + x[n, c], 0) ** p / classes``, then mean or sum."""
    return _fix_empty_loss(aten.multi_margin_loss.default(x, target, p, margin, weight, reduction), x, reduction)


@multi_margin_loss.onnx
@handle_empty_mean
def _(op, x, target, weight, *, p, margin, reduction):
    x = as_vector(op, x)
    axis = _class_axis(op, x)
    axes = op.ints([axis])
    classes = op.scalar(op.shape(x)[axis], torch.int64)
    index = op.Unsqueeze(target, axes) if op.rank(target) == axis else target
    gap = op.Add(op.Sub(op.like(x, margin), op.GatherElements(x, index, axis=axis)), x)
    losses = op.Mul(gap, gap) if p == 2 else gap
    if weight is not None:
        losses = op.Mul(losses, op.Gather(weight, index, axis=0))
    every = op.Range(op.scalar(0, torch.int64), classes, op.scalar(1, torch.int64))
    wrong = op.And(op.Greater(gap, op.like(x, 0)), op.Not(op.Equal(every, index)))  # a NaN gap does not count
    losses = op.Where(wrong, losses, op.like(x, 0))
    means = op.Div(op.ReduceSum(losses, axes, keepdims=0), op.cast(classes, op.dtype(x)))
    return reduce_losses(op, means, reduction)


multi_margin_loss.types(_loss_type)


@multi_margin_loss.samples
def _(draw, s):
    classes = draw(s.integers(2, 5))
    shape = draw(s.choice((draw(s.integers(1, 4)), classes), (classes,), ()))
    classes = classes if shape else 1
    x = draw(s.tensor(shape=shape, dtype=FLOATS[::2]))
    target = draw(s.tensor(shape=shape[:-1], dtype=torch.int64, low=0, high=classes - 1, domain=(0, classes - 1)))
    weight = draw(s.tensor(shape=(classes,), dtype=x.dtype, low=0.1)) if draw(s.booleans()) else None
    return s.call(
        x,
        target,
        weight,
        p=draw(s.choice(1, 2)),
        margin=draw(s.choice(1.0, 0.5)),
        reduction=draw_reduction(draw, s),
    )


@operator(aten.multilabel_margin_loss.default, error=COMPOSE)
def multilabel_margin_loss(x: Tensor, target: Tensor, *, reduction: int = REDUCE_MEAN) -> Tensor:
    """``sum over targets t and other classes c of max(1 - x[n, t] + x[n, c], 0) / classes``, then mean or sum.

    ``target[n, c]`` lists the target classes of each row, up to the first -1.
    """
    return _fix_empty_loss(aten.multilabel_margin_loss.default(x, target, reduction), x, reduction)


@multilabel_margin_loss.onnx
@handle_empty_mean
def _(op, x, target, *, reduction):
    if not op.rank(x):  # one class
        x, target = (op.declare(op.Reshape(t, op.ints([1])), TensorType(op.dtype(t), (1,))) for t in (x, target))
    axis, dtype = _class_axis(op, x), op.dtype(x)
    zero, one = op.like(x, 0), op.like(x, 1)
    is_padding = op.cast(op.Less(target, op.like(target, 0)), torch.int64)
    listed = op.Equal(op.CumSum(is_padding, op.scalar(axis, torch.int64)), op.scalar(0, torch.int64))
    index = op.Where(listed, target, op.like(target, 0))
    counts = op.cast(listed, dtype)
    right = op.ScatterElements(op.Mul(counts, zero), index, counts, axis=axis, reduction="max")
    lead = op.Sub(one, op.GatherElements(x, index, axis=axis))
    gaps = op.Add(op.Unsqueeze(lead, op.ints([-1])), op.Unsqueeze(x, op.ints([-2])))
    pairs = op.Mul(op.Unsqueeze(counts, op.ints([-1])), op.Unsqueeze(op.Sub(one, right), op.ints([-2])))
    counted = op.And(op.Greater(pairs, zero), op.Greater(gaps, zero))  # a NaN gap does not count
    total = op.ReduceSum(op.Where(counted, gaps, zero), op.ints([axis, axis + 1]), keepdims=0)
    return reduce_losses(op, op.Div(total, op.scalar(op.shape(x)[axis], dtype)), reduction)


multilabel_margin_loss.types(_loss_type)


@multilabel_margin_loss.samples
def _(draw, s):
    shape = (draw(s.integers(1, 4)), draw(s.integers(1, 6)))[draw(s.integers(0, 2)) :]
    x = draw(s.tensor(shape=shape, dtype=FLOATS[::2]))
    last = shape[-1] - 1 if shape else 0
    target = draw(s.tensor(shape=shape, dtype=torch.int64, low=-1, high=last, domain=(-1, last)))
    return s.call(x, target, reduction=draw_reduction(draw, s))
