"""Sizes, padding and unbatched inputs of operators on spatial dims: convolutions, pooling and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import FloorDiv

SPATIAL_DIMS = {1: "w", 2: "h, w", 3: "d, h, w"}
"""Text for docstrings, by the number of spatial dims: the dims of ``x[n, c, ...]``."""

POOLED_INDICES = {1: "index along ``w``", 2: "flat index in the plane", 3: "flat index in the volume"}
"""Text for docstrings, by the number of spatial dims: the index of a maximum that max pooling returns."""


SAME_UPPER = "same_upper"
"""Padding as by TensorFlow's "same": ``ceil(n / stride)`` windows, and the extra element of an odd total at the end."""


def expand_per_dim(value: Any, count: int) -> tuple[Any, ...]:
    """Return a tuple with one entry per spatial dim; ATen also accepts a single entry, or a number, for all dims."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return entries if len(entries) == count else entries * count


def allow_unbatched(dims, lowering):
    """Return a lowering that also accepts an unbatched ``x``, by adding a batch dim of size 1.

    ``dims`` is the number of spatial dims.
    """

    def lower(op, x, *rest, **attrs):
        if op.rank(x) != dims + 1:
            return lowering(op, x, *rest, **attrs)
        batched = op.declare(op.Unsqueeze(x, op.ints([0])), TensorType(op.dtype(x), (1, *op.shape(x))))
        results = lowering(op, batched, *rest, **attrs)
        if isinstance(results, tuple):
            return tuple(op.Squeeze(r, op.ints([0])) for r in results)
        return op.Squeeze(results, op.ints([0]))

    return lower


def as_expression(length: Any) -> sympy.Expr:
    """Return a size as a sympy expression."""
    return sympy.Integer(length) if isinstance(length, int) else length


def is_explicit(padding: Any, dims: int) -> bool:
    """Whether a padding stands for a preceding ``pad`` of ``dims`` spatial dims.

    It is `SAME_UPPER`, or all begins and then all ends, as in ONNX. ATen has neither; fold-padding makes them.
    """
    return padding == SAME_UPPER or (not isinstance(padding, str) and len(padding) == 2 * dims)


def require_same_upper(kernel: Sequence[Any], stride: Sequence[Any], dilation: Sequence[Any]) -> None:
    """Reject windows that ONNX Runtime 1.31 pads wrongly with `SAME_UPPER`.

    Raises:
        ValueError: a window is dilated, or a stride is larger than the kernel.
    """
    if any(d != 1 or s > k for k, s, d in zip(kernel, stride, dilation, strict=True)):
        raise ValueError(
            f"padding={SAME_UPPER!r} with the kernel size {list(kernel)}, the stride {list(stride)} and the dilation "
            f"{list(dilation)}: it needs a dilation of 1, and strides up to the kernel size"
        )


def explicit_ends(
    padding: Any, lengths: Sequence[Any], kernel: Sequence[Any], stride: Sequence[Any], dilation: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the begins and ends of an explicit padding. The other arguments have one entry per spatial dim.

    Raises:
        ValueError: as `require_same_upper`.
    """
    if padding != SAME_UPPER:
        return list(padding[: len(kernel)]), list(padding[len(kernel) :])
    require_same_upper(kernel, stride, dilation)
    totals = [max((ceil_divide(n, s) - 1) * s + k - n, 0) for n, k, s in zip(lengths, kernel, stride, strict=True)]
    return [total // 2 for total in totals], [total - total // 2 for total in totals]


def count_explicit_windows(
    padding: Any, lengths: Sequence[Any], kernel: Sequence[Any], stride: Sequence[Any], dilation: Sequence[Any]
) -> list[Any]:
    """Return the number of windows along each spatial dim with an explicit padding.

    Raises:
        ValueError: as `require_same_upper`.
    """
    if padding == SAME_UPPER:
        require_same_upper(kernel, stride, dilation)
        return [ceil_divide(n, s) for n, s in zip(lengths, stride, strict=True)]
    begins, ends = padding[: len(kernel)], padding[len(kernel) :]
    spatial = zip(lengths, begins, ends, kernel, stride, dilation, strict=True)
    return [count_windows(n + before + after, k, s, 0, d) for n, before, after, k, s, d in spatial]


def pad_ends(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0) -> Tensor:
    """Pad the last dims of a tensor, with one entry of ``before`` and ``after`` for each."""
    pads = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return torch.constant_pad_nd(x, pads, value)


def floor_divide(a: Any, b: Any) -> Any:
    """Return ``floor(a / b)`` of two sizes, numbers or expressions."""
    return FloorDiv(as_expression(a), as_expression(b)) if is_symbolic((a, b)) else a // b


def ceil_divide(a: Any, b: Any) -> Any:
    """Return ``ceil(a / b)`` of two sizes, numbers or expressions."""
    return floor_divide(a + b - 1, b)


def count_windows(n: Any, k: Any, s: Any, p: Any, d: Any) -> Any:
    """Return ``floor((n + 2 p - d (k - 1) - 1) / s) + 1``, the number of windows along a dim of size ``n``.

    ``k`` is the kernel size, ``s`` the stride, ``p`` the padding and ``d`` the dilation.
    """
    return floor_divide(n + 2 * p - d * (k - 1) - 1, s) + 1


def pad_zeros(op: Any, x: Any, before: Any, after: Any) -> Any:
    """Pad the last dims of ``x`` with zeros, one entry of ``before`` and ``after`` for each dim."""
    shape = op.shape(x)
    unpadded = [0] * (len(shape) - len(before))
    before, after = [*unpadded, *before], [*unpadded, *after]
    padded = TensorType(op.dtype(x), tuple(a + n + b for a, n, b in zip(before, shape, after, strict=True)))
    return op.declare(pad_all_dims(op, x, before, after), padded)


def pad_all_dims(op: Any, x: Any, before: Any, after: Any, filling: Any = None, mode: str = "constant") -> Any:
    """Pad each dim of ``x``, with one entry of ``before`` and ``after`` for each.

    All axes are listed, because of two faults of ONNX Runtime 1.31:

    - Without axes, it fuses the Pad into a pooling after it. The pooling then ignores padded elements in a maximum, and
      may have shorter windows.
    - With axes for some dims only, it permutes the pads wrongly when it moves a Transpose across the Pad.
    """
    return op.Pad(x, op.ints([*before, *after]), filling, op.ints(range(len(before))), mode=mode)
