"""Batch, instance and group normalization: subtract a mean, divide by a deviation, then scale and shift."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from clika_ref.core.accuracy import NORM
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref_aten.activation import is_exact_as_attribute
from clika_ref_aten.elementwise import FLOATS, reshape_per_channel
from clika_ref_aten.reduction import is_nonempty
from clika_ref_aten.size_arithmetic import same_type
from clika_ref_aten.spatial import floor_divide

aten = torch.ops.aten

EPSILONS = (1e-5, 1e-12, 0.1)


def promote_together(op, *operands):
    """Return the operands in one dtype: unchanged if all agree, otherwise promoted together with float32."""
    is_same = len({op.dtype(o) for o in operands if o is not None}) == 1
    return operands if is_same else promote_to_float32(op, *operands)


def promote_to_float32(op, *operands):
    """Promote the operands that are not None to at least float32, since eager computes statistics in it."""
    dtypes = (op.dtype(o) for o in operands if o is not None)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return tuple(None if o is None else op.cast(o, dtype) for o in operands)


def fill_if_none(op, value, x, number, *shape):
    """Return ``value``, or if it is None a tensor of that ``shape`` filled with ``number``, in the dtype of ``x``."""
    if value is not None:
        return value
    if is_symbolic(shape):
        return op.Expand(op.like(x, number), op.ints(shape))
    return op.constant(torch.full(shape, float(number)), op.dtype(x))


def compute_statistics(op, x, axes):
    """Return ``x`` minus its mean along ``axes``, that mean, and the biased variance; reduced dims have size 1."""
    mean = op.ReduceMean(x, op.ints(axes), keepdims=1)
    centred = op.Sub(x, mean)
    return centred, mean, op.ReduceMean(op.Mul(centred, centred), op.ints(axes), keepdims=1)


def divide_by_deviation(op, centred, variance, eps):
    """Return ``centred / sqrt(variance + eps)``."""
    return op.Div(centred, op.Sqrt(op.Add(variance, op.like(variance, eps))))


def apply_affine(op, x, weight, bias):
    """Return ``x * weight + bias``; either may be None."""
    x = x if weight is None else op.Mul(x, weight)
    return x if bias is None else op.Add(x, bias)


def apply_channel_affine(op, x, weight, bias, rank):
    """Return ``x[n, c, ...] * weight[c] + bias[c]``; either may be None."""
    return apply_affine(op, x, *(None if v is None else reshape_per_channel(op, v, rank) for v in (weight, bias)))


def non_channel_axes(rank):
    """Return the axes of ``x[n, c, ...]`` that batch statistics reduce."""
    return [i for i in range(rank) if i != 1]


@operator(aten.batch_norm.default, quant=OWN_QPARAMS, error=NORM)
def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]`` for ``x[n, c, ...]``.

    Mean and variance are the running statistics, or with ``training`` those of the batch. This operator never updates
    the running statistics: `running_mean_update` and `running_var_update` compute their next values, with ``momentum``.
    ``momentum=None`` marks a module that averages the statistics of all batches, as in ``torch.nn.BatchNorm2d``.
    """
    # Detached, as lowering may merge statistics with equal parameters.
    mean = None if training or running_mean is None else running_mean.detach()
    var = None if training or running_var is None else running_var.detach()
    return torch.batch_norm(x, weight, bias, mean, var, training, momentum or 0.0, eps, torch.backends.cudnn.enabled)


@batch_norm.onnx
def _(op, x, *vectors, training, momentum, eps):
    if not training:
        return normalize_with_statistics(op, x, *vectors, eps=eps)
    return _normalize_along(op, x, *vectors[:2], axes=non_channel_axes(op.rank(x)), eps=eps)


def _normalize_along(op, x, weight, bias, *, axes, eps):
    """Normalize ``x`` by its own statistics along ``axes``."""
    x, weight, bias = promote_to_float32(op, x, weight, bias)
    centred, _, variance = compute_statistics(op, x, axes)
    result = apply_channel_affine(op, divide_by_deviation(op, centred, variance, eps), weight, bias, op.result.rank)
    return op.cast(result, op.result.dtype)


def _fill_affine(op, x, weight, bias, channels):
    """Return weight and bias per channel, with ones and zeros in place of None."""
    return fill_if_none(op, weight, x, 1, channels), fill_if_none(op, bias, x, 0, channels)


def normalize_with_statistics(op, x, *vectors, eps):
    """Normalize ``x`` by given statistics, in one node if possible: runtimes fold it into a preceding convolution."""
    rank, channels = op.rank(x), op.shape(x)[1]
    x, weight, bias, mean, var = promote_together(op, x, *vectors)
    if is_exact_as_attribute(op, eps):
        weight, bias = _fill_affine(op, x, weight, bias, channels)
        return op.cast(op.BatchNormalization(x, weight, bias, mean, var, epsilon=float(eps)), op.result.dtype)
    centred = op.Sub(x, reshape_per_channel(op, mean, rank))
    result = divide_by_deviation(op, centred, reshape_per_channel(op, var, rank), eps)
    return op.cast(apply_channel_affine(op, result, weight, bias, rank), op.result.dtype)


def _draw_channel_operands(draw, s, x):
    """Draw weight and bias (both or neither), and running statistics, for ``x[n, c, ...]``."""

    def vector(low, high, domain=None):
        return draw(s.tensor(shape=(x.shape[1],), dtype=x.dtype, low=low, high=high, domain=domain))

    affine = (vector(-2, 2), vector(-2, 2)) if draw(s.booleans()) else (None, None)
    return (*affine, vector(-1, 1), vector(0.1, 2, (0.0, math.inf)))


def _statistics_sampler(min_rank, flag):
    """Return a sampler for calls with running statistics, which are optional if the attribute ``flag`` is True."""

    def sample(draw, s):
        x = draw(s.tensor(rank=(min_rank, 5), size=(2, 5), dtype=FLOATS))
        is_batch = draw(s.booleans())
        weight, bias, mean, var = _draw_channel_operands(draw, s, x)
        if is_batch and draw(s.booleans()):
            mean = var = None
        attrs = {flag: is_batch, "momentum": draw(s.choice(0.1, 0.3)), "eps": draw(s.choice(*EPSILONS))}
        return s.call(x, weight, bias, mean, var, **attrs)

    return sample


batch_norm.types(same_type)


batch_norm.samples(_statistics_sampler(2, "training"))


@operator(aten.instance_norm.default, quant=OWN_QPARAMS, error=NORM)
def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean[n, c]) / sqrt(var[n, c] + eps) * weight[c] + bias[c]`` for ``x[n, c, ...]``.

    Without ``use_input_stats``, mean and variance are the running statistics. These are never updated here, as in
    `batch_norm`.
    """
    stats = (None, None) if use_input_stats else (running_mean, running_var)
    return torch.instance_norm(x, weight, bias, *stats, use_input_stats, momentum, eps, torch.backends.cudnn.enabled)


@instance_norm.onnx
def _(op, x, *vectors, use_input_stats, momentum, eps):
    rank, channels = op.rank(x), op.shape(x)[1]
    if 0 in op.shape(x):  # ONNX Runtime 1.31 crashes on it in FP16
        return op.Identity(op.cast(x, op.result.dtype))
    if not use_input_stats:
        return normalize_with_statistics(op, x, *vectors, eps=eps)
    x, weight, bias = promote_together(op, x, *vectors[:2])
    if rank > 2 and op.dtype(x) != torch.float64:
        weight, bias = _fill_affine(op, x, weight, bias, channels)
        return op.cast(op.InstanceNormalization(x, weight, bias, epsilon=float(eps)), op.result.dtype)
    return _normalize_along(op, x, weight, bias, axes=list(range(2, rank)), eps=eps)


instance_norm.types(same_type)


instance_norm.samples(_statistics_sampler(3, "use_input_stats"))


@operator(aten.group_norm.default, quant=OWN_QPARAMS, error=NORM)
def group_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    num_groups: int,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean[n, g]) / sqrt(var[n, g] + eps) * weight[c] + bias[c]`` for ``x[n, c, ...]`` in groups of channels."""
    return torch.group_norm(x, num_groups, weight, bias, eps, torch.backends.cudnn.enabled)


@group_norm.onnx
def _(op, x, weight, bias, *, num_groups, eps):
    rank, shape = op.rank(x), op.shape(x)
    if 0 in shape:  # ONNX Runtime 1.31 crashes on an empty InstanceNormalization in FP16
        return op.Identity(op.cast(x, op.result.dtype))
    x, weight, bias = promote_together(op, x, weight, bias)
    grouped = op.reshape(x, (shape[0], num_groups, floor_divide(math.prod(shape[1:]), num_groups)))
    if op.dtype(x) == torch.float64:
        centred, _, variance = compute_statistics(op, grouped, [2])
        normal = divide_by_deviation(op, centred, variance, eps)
    else:
        one, zero = _fill_affine(op, x, None, None, num_groups)
        normal = op.InstanceNormalization(grouped, one, zero, epsilon=float(eps))
    result = apply_channel_affine(op, op.reshape(normal, shape), weight, bias, rank)
    return op.cast(result, op.result.dtype)


group_norm.types(same_type)


@group_norm.samples
def _(draw, s):
    num_groups = draw(s.choice(1, 2, 3))
    shape = list(draw(s.tensor(rank=(2, 5), size=(2, 4))).shape)
    shape[1] = num_groups * draw(s.integers(1, 3))
    x = draw(s.tensor(shape=shape, dtype=FLOATS))
    weight, bias, _, _ = _draw_channel_operands(draw, s, x)
    return s.call(x, weight, bias, num_groups=num_groups, eps=draw(s.choice(*EPSILONS)))


def _update_running_statistics(x, running_mean, running_var, momentum, per_instance):
    """Return the running statistics after one batch, exactly as the module updates them."""
    mean, var = running_mean.clone(), running_var.clone()
    update = torch.instance_norm if per_instance else torch.batch_norm
    update(x, None, None, mean, var, True, momentum, 1e-5, False)
    return mean, var


def _blend_running_statistic(op, running, batch, shape, *, momentum, per_instance):
    """Return ``(1 - momentum) * running + momentum * batch`` in the dtype of the running statistics.

    An empty batch leaves them unchanged, but eager's mean over 0 instances is NaN.
    """
    count = math.prod(shape)
    wide = op.cast(running, op.dtype(batch))
    old = op.Mul(wide, op.like(batch, 1 - momentum))
    updated = op.cast(op.Add(old, op.Mul(batch, op.like(batch, momentum))), op.dtype(running))
    if op.sizes.may_be_zero(count):
        updated = op.Where(is_nonempty(op, count), updated, running)
    if per_instance and op.sizes.may_be_zero(shape[0]):
        updated = op.Where(is_nonempty(op, shape[0]), updated, op.like(running, math.nan))
    return updated


def _running_type(x, running, *, momentum, per_instance):
    return running


def _update_samples(low, high):
    def sampler(draw, s):
        per_instance = draw(s.booleans())
        x = draw(s.tensor(rank=(3 if per_instance else 2, 5), size=(2, 5), dtype=FLOATS))
        running = draw(s.tensor(shape=(x.shape[1],), dtype=x.dtype, low=low, high=high))
        return s.call(x, running, momentum=draw(s.choice(0.1, 0.3, 1.0)), per_instance=per_instance)

    return sampler


@operator(error=NORM)
def running_mean_update(x: Tensor, running_mean: Tensor, *, momentum: float, per_instance: bool = False) -> Tensor:
    """``(1 - momentum) * running_mean[c] + momentum * mean[c]`` of ``x[n, c, ...]``, after one training step.

    ``per_instance`` averages per-image statistics, as instance normalization does.
    """
    return _update_running_statistics(x, running_mean, torch.ones_like(running_mean), momentum, per_instance)[0]


@running_mean_update.onnx
def _(op, x, running_mean, *, momentum, per_instance):
    shape = op.shape(x)
    (x,) = promote_to_float32(op, x)
    mean = op.ReduceMean(x, op.ints(non_channel_axes(len(shape))), keepdims=0)
    return _blend_running_statistic(op, running_mean, mean, shape, momentum=momentum, per_instance=per_instance)


running_mean_update.types(_running_type)
running_mean_update.samples(_update_samples(-1, 1))


@operator(error=NORM)
def running_var_update(x: Tensor, running_var: Tensor, *, momentum: float, per_instance: bool = False) -> Tensor:
    """``(1 - momentum) * running_var[c] + momentum * var[c]`` of ``x[n, c, ...]``, with the unbiased variance.

    ``per_instance`` averages per-image statistics, as instance normalization does.
    """
    return _update_running_statistics(x, torch.zeros_like(running_var), running_var, momentum, per_instance)[1]


@running_var_update.onnx
def _(op, x, running_var, *, momentum, per_instance):
    shape = op.shape(x)
    axes = list(range(2, len(shape))) if per_instance else non_channel_axes(len(shape))
    count = functools.reduce(lambda a, b: a * b, (shape[i] for i in axes), 1)
    (x,) = promote_to_float32(op, x)
    centred = op.Sub(x, op.ReduceMean(x, op.ints(axes), keepdims=1))
    total = op.ReduceSum(op.Mul(centred, centred), op.ints(axes), keepdims=0)
    variance = op.Div(total, op.scalar(count - 1, op.dtype(x)))
    if per_instance:
        variance = op.ReduceMean(variance, op.ints([0]), keepdims=0)
    return _blend_running_statistic(op, running_var, variance, shape, momentum=momentum, per_instance=per_instance)


running_var_update.types(_running_type)
running_var_update.samples(_update_samples(0.1, 2))
