"""Replicas of the evaluator's deviating operators in PyTorch, with the arguments of the operator."""

from typing import Any

import torch

OPTIONS = {"reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
"""Options of a cross entropy, with their defaults."""


def log_of_softmax(x: torch.Tensor, *, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``log(softmax(x))`` in the dtype of the result, as two functions that round one after the other."""
    return torch.log(torch.softmax(x, dim, dtype=dtype))


def loss_of_log_of_softmax(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Return the cross entropy of `log_of_softmax`; a second ``log_softmax`` does not change these values."""
    classes = 1 if x.ndim > 1 else 0
    logs = torch.log(torch.softmax(x, classes))
    reduction, *others = (options.get(name, default) for name, default in OPTIONS.items())
    return torch.ops.aten.cross_entropy_loss.default(logs, target, weight, reduction, *others)


def quantize_by_int32(
    x: torch.Tensor, scale: Any, zero_point: Any, *, axis: int | None = None, **options: Any
) -> torch.Tensor:
    """Return steps of ``scale`` as integers, cast to int32 before they are clamped to their range."""
    steps = torch.round(x.float() / expand_to_axis(scale, x, axis))
    inside = (steps >= -(2.0**31)) & (steps < 2.0**31)
    steps = torch.where(inside, steps, -(2.0**31)).to(torch.int32) + expand_to_axis(zero_point, x, axis).to(torch.int32)
    limits = torch.iinfo(dtype := options.get("dtype", torch.int8))
    low, high = options.get("quant_min"), options.get("quant_max")
    bounds = (limits.min if low is None else low, limits.max if high is None else high)
    return torch.clamp(steps, *bounds).to(dtype)


def expand_to_axis(item: Any, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return one number per element of an axis of ``x``, in a shape that broadcasts with it."""
    item = torch.as_tensor(item)
    if axis is None:
        return item
    shape = [1] * x.ndim
    shape[axis] = -1
    return item.reshape(shape)
