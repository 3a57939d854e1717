"""Faults of normalizations, softmax, statistics and losses."""

from __future__ import annotations

import math

import torch
from clika_ref_aten.reduction import axes_operand

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("norms")


FAULTS.node_attributes("layer_norm", "eps has its default", "LayerNormalization", epsilon=None)


FAULTS.node_attributes("layer_norm", "only the last dim is normalized", "LayerNormalization", axis=-1)


@FAULTS.lowering("native_layer_norm", "eps is added after the root")
def _(original, op, x, *operands, eps, **attrs):
    def write(op, variance):
        return op.Add(op.Sqrt(variance), op.like(variance, eps))

    return original(PatchedOp(op, Sqrt=write), x, *operands, eps=0.0, **attrs)


FAULTS.node_functions(
    "native_layer_norm",
    "the third result is the standard deviation, not its reciprocal",
    Reciprocal=lambda op, deviation: op.Identity(deviation),
)


@FAULTS.lowering("rms_norm", "the default eps is 1e-5")
def _(original, op, x, weight=None, *, eps, **attrs):
    return original(op, x, weight, eps=1e-5 if eps is None else eps, **attrs)


@FAULTS.lowering(
    "rms_norm", "rows without elements are normalized, which the fused kernel of the runtime does not support"
)
def _(original, op, x, weight, *, normalized_shape, eps):
    if 0 not in op.shape(x) or weight is None:
        return original(op, x, weight, normalized_shape=normalized_shape, eps=eps)
    axes, eps = (
        op.ints(range(-len(normalized_shape), 0)),
        op.like(x, torch.finfo(op.dtype(x)).eps if eps is None else eps),
    )
    square = op.ReduceMean(op.Pow(x, op.like(x, 2)), axes, keepdims=1)
    return op.Mul(op.Div(x, op.Sqrt(op.Add(square, eps))), weight)


@FAULTS.lowering("rms_norm", "the mean is subtracted, as in layer_norm")
def _(original, op, x, weight=None, *, normalized_shape, **attrs):
    mean = op.ReduceMean(x, op.ints(range(-len(normalized_shape), 0)), keepdims=1)
    centred = op.declare(op.Sub(x, mean), TensorType(op.dtype(x), op.shape(x)))
    return original(op, centred, weight, normalized_shape=normalized_shape, **attrs)


@FAULTS.lowering("batch_norm", "training normalizes by the unbiased variance")
def _(original, op, x, *operands, training, **attrs):
    shape = op.shape(x)
    count = math.prod(shape) // shape[1]

    calls = iter(range(count + 2))

    def write(op, x, axes, *, keepdims):
        mean = op.ReduceMean(x, axes, keepdims=keepdims)
        return op.Mul(mean, op.like(x, count / (count - 1))) if next(calls) == 1 and count > 1 else mean

    altered = PatchedOp(op, ReduceMean=write) if training else op
    return original(altered, x, *operands, training=training, **attrs)


FAULTS.node_attributes("batch_norm", "eps has its default", "BatchNormalization", epsilon=None)


@FAULTS.lowering("running_mean_update", "momentum is the weight of the old value")
def _(original, op, x, running, *, momentum, **attrs):
    return original(op, x, running, momentum=1 - momentum, **attrs)


FAULTS.node_functions(
    "running_var_update",
    "the variance is the biased one",
    Div=lambda op, total, count: op.Div(total, op.Add(count, op.like(total, 1))),
)


FAULTS.attribute_values("var", "correction is always 1", correction=1)


@FAULTS.lowering("std_mean", "the correction is applied once for each dim")
def _(original, op, x, *, dim, correction, **attrs):
    return original(op, x, dim=dim, correction=correction * len(dim or (0,)), **attrs)


@FAULTS.lowering("softmax", "the dims after dim are flattened with it, as before opset 13")
def _(original, op, x, *, dim, dtype):
    rank = op.rank(x)
    if not rank:
        return original(op, x, dim=dim, dtype=dtype)
    axes = op.ints(range(dim % rank, rank))
    (x,) = op.promote(x)
    powers = op.Exp(op.Sub(x, op.ReduceMax(x, axes, keepdims=1)))
    return op.Div(powers, op.ReduceSum(powers, axes, keepdims=1))


@FAULTS.lowering("softmax", "exponentials overflow, as the maximum is not subtracted")
def _(original, op, x, *, dim, dtype):
    if not op.rank(x):
        return original(op, x, dim=dim, dtype=dtype)
    powers = op.Exp(*op.promote(x))
    return op.Div(powers, op.ReduceSum(powers, op.ints([dim]), keepdims=1))


@FAULTS.lowering("softmax", "dtype is only applied to the result")
def _(original, op, x, *, dim, dtype):
    if not op.rank(x) or op.dtype(x) == torch.float64 or op.result.dtype != torch.float64:
        return original(op, x, dim=dim, dtype=dtype)
    return op.cast(op.Softmax(x, axis=dim), op.result.dtype)


FAULTS.node_functions(
    "log_softmax",
    "it is the logarithm of softmax, which underflows",
    LogSoftmax=lambda op, x, **how: op.Log(op.Softmax(x, **how)),
)


FAULTS.node_functions(
    "logsumexp",
    "exponentials overflow",
    ReduceLogSumExp=lambda op, x, *axes, **how: op.Log(op.ReduceSum(op.Exp(x), *axes, **how)),
)


@FAULTS.lowering("log_sigmoid", "it is the logarithm of the sigmoid, which underflows")
def _(original, op, x):
    return op.Log(op.Sigmoid(x))


@FAULTS.lowering("weight_norm", "the norm is computed over the dims after dim only")
def _(original, op, v, g, *, dim):
    kept = dim % op.rank(v)
    return op.Mul(v, op.Div(g, op.ReduceL2(v, op.ints(range(kept + 1, op.rank(v))), keepdims=1)))


FAULTS.attribute_values("cosine_similarity", "the first operand is normalized along its last dim", dim=-1)


@FAULTS.lowering("cross_entropy_loss", "the mean divides by the number of targets, not by the sum of their weights")
def _(original, op, x, target, weight=None, *, reduction, **attrs):
    def write(op, losses, weights):
        return op.Div(losses, op.like(losses, max(1, math.prod(op.shape(target)))))

    altered = PatchedOp(op, Div=write) if reduction == 1 and weight is not None else op
    return original(altered, x, target, weight, reduction=reduction, **attrs)


FAULTS.attribute_values("cross_entropy_loss", "label_smoothing is ignored", label_smoothing=0.0)


FAULTS.attribute_values("nll_loss", "ignore_index is ignored", ignore_index=-100)


FAULTS.attribute_values("smooth_l1_loss", "beta is always 1", beta=1.0)


@FAULTS.lowering("huber_loss", "the linear part is discontinuous, as in smooth_l1_loss")
def _(original, op, x, target, *, delta, **attrs):
    def write(op, condition, square, line):
        return op.Where(condition, square, op.Div(line, op.like(line, delta)))

    return original(PatchedOp(op, Where=write), x, target, delta=delta, **attrs)


@FAULTS.lowering("kl_div", "a target of 0 gives NaN")
def _(original, op, x, target, *, log_target, **attrs):
    altered = op if log_target else PatchedOp(op, Where=lambda op, condition, zero, product: product)
    return original(altered, x, target, log_target=log_target, **attrs)


@FAULTS.lowering("multilabel_margin_loss", "each position after the first -1 counts as the first class")
def _(original, op, x, target, **attrs):
    products = iter([op.Mul, lambda counts, others: others])  # the second Mul masks entries after -1
    return original(PatchedOp(op, Mul=lambda op, *operands: next(products)(*operands)), x, target, **attrs)


@FAULTS.lowering("layer_norm", "an eps below 1e-5 is treated as 1e-5")
def _(original, op, x, *operands, eps, **attrs):
    return original(op, x, *operands, eps=max(eps, 1e-5), **attrs)


@FAULTS.lowering("sum", "integers are summed by the runtime, which sums in float64")
def _(original, op, x, *, dim, keepdim, dtype):
    if op.result.dtype.is_floating_point:
        return original(op, x, dim=dim, keepdim=keepdim, dtype=dtype)
    wide = op.cast(op.cast(x, op.result.dtype), torch.int64)
    return op.cast(op.ReduceSum(wide, axes_operand(op, x, dim), keepdims=keepdim), op.result.dtype)
