"""What convolutions, pooling and resampling share: sides after channels, with or without a batch."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType


def spread(value: Any, count: int) -> tuple[Any, ...]:
    """Return one entry per spatial side: ATen lets a single entry, or a number, stand for all."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return entries if len(entries) == count else entries * count


def batched(sides, lowering):
    """Return a lowering that also takes operands without a batch: it lends them one of size 1."""

    def lower(op, x, *rest, **attrs):
        if op.rank(x) != sides + 1:
            return lowering(op, x, *rest, **attrs)
        wide = op.declare(op.Unsqueeze(x, op.ints([0])), TensorType(op.dtype(x), (1, *op.shape(x))))
        results = lowering(op, wide, *rest, **attrs)
        if isinstance(results, tuple):
            return tuple(op.Squeeze(r, op.ints([0])) for r in results)
        return op.Squeeze(results, op.ints([0]))

    return lower


def as_expression(length: Any) -> sympy.Expr:
    """Return a length as a sympy expression."""
    return sympy.Integer(length) if isinstance(length, int) else length


def floor_divide(a: Any, b: Any) -> Any:
    """Return ``floor(a / b)`` of lengths, which may be size expressions."""
    return FloorDiv(as_expression(a), as_expression(b)) if is_symbolic((a, b)) else a // b


def ceil_divide(a: Any, b: Any) -> Any:
    """Return ``ceil(a / b)`` of lengths, which may be size expressions."""
    return floor_divide(a + b - 1, b)


def padded(op: Any, x: Any, before: Any, after: Any) -> Any:
    """Return ``x`` with zeros before and after its last sides."""
    shape = op.shape(x)
    rest = [0] * (len(shape) - len(before))
    starts, ends = [*rest, *before], [*rest, *after]
    wider = TensorType(op.dtype(x), tuple(a + n + b for a, n, b in zip(starts, shape, ends, strict=True)))
    return op.declare(enlarged(op, x, starts, ends), wider)


def enlarged(op: Any, x: Any, before: Any, after: Any, filling: Any = None, mode: str = "constant") -> Any:
    """Return ``x`` with elements before and after each of its sides.

    The sides are named although all are given. Without names, ONNX Runtime 1.31 makes the elements padding of a pooling
    that follows, which takes the maximum without them and may have shorter windows; with names of some sides only, it
    permutes the lengths wrongly where it moves a transpose over the call.
    """
    return op.Pad(x, op.ints([*before, *after]), filling, op.ints(range(len(before))), mode=mode)
