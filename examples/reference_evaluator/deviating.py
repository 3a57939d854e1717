"""What the evaluator computes where it deviates: the arguments of the operator, in PyTorch."""

from typing import Any

import torch

OPTIONS = {"reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
"""Of a cross entropy, with what they are by default."""


def log_of_softmax(x: torch.Tensor, *, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``log(softmax(x))`` in the dtype of the result, as two functions that round one after the other."""
    return torch.log(torch.softmax(x, dim, dtype=dtype))


def loss_of_log_of_softmax(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Return the cross entropy by way of `log_of_softmax`, of which another logarithm of a softmax changes nothing."""
    classes = 1 if x.ndim > 1 else 0
    logs = torch.log(torch.softmax(x, classes))
    reduction, *others = (options.get(name, default) for name, default in OPTIONS.items())
    return torch.ops.aten.cross_entropy_loss.default(logs, target, weight, reduction, *others)


def quantize_by_int32(
    x: torch.Tensor, scale: Any, zero_point: Any, *, axis: int | None = None, **options: Any
) -> torch.Tensor:
    """Return steps of ``scale`` as integers that were int32 before they were cut off at the ends of their range."""
    steps = torch.round(x.float() / along(scale, x, axis))
    inside = (steps >= -(2.0**31)) & (steps < 2.0**31)
    steps = torch.where(inside, steps, -(2.0**31)).to(torch.int32) + along(zero_point, x, axis).to(torch.int32)
    limits = torch.iinfo(dtype := options.get("dtype", torch.int8))
    low, high = options.get("quant_min"), options.get("quant_max")
    bounds = (limits.min if low is None else low, limits.max if high is None else high)
    return torch.clamp(steps, *bounds).to(dtype)


def along(item: Any, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return one number per element of a side of ``x`` in the shape that broadcasts against it."""
    item = torch.as_tensor(item)
    if axis is None:
        return item
    shape = [1] * x.ndim
    shape[axis] = -1
    return item.reshape(shape)
