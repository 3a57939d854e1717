"""The larger, the smaller and the sign of elements, of int64 too.

Of two int64 whose upper halves are equal, Max, Min, Clip, Relu, Sign, ReduceMax and ReduceMin of ONNX Runtime 1.31
compare the lower halves as if they had a sign: 2 ** 31 is less than 0 there. Less, Greater and Equal are right.
"""

from __future__ import annotations

import torch

from clika_ref_aten.elementwise import computed

HALF = 2**32
"""How many numbers one half of an int64 tells apart."""


def extreme(op, op_type: str, x, y):
    """Add the nodes that give the larger (``"Max"``) or the smaller (``"Min"``) of two; NaN where one is NaN."""
    if op.dtype(x) == torch.int64:
        return op.Where(op.node("Greater" if op_type == "Max" else "Less", x, y), x, y)
    return computed(op, op_type, x, y, via={torch.int16: torch.int32})  # for which ONNX Runtime has no kernel


def clip(op, x, low, high):
    """Add the nodes that keep ``x`` between two finite bounds."""
    low, high = op.like(x, low), op.like(x, high)
    if op.dtype(x) == torch.int64:
        return extreme(op, "Min", extreme(op, "Max", x, low), high)
    return op.Clip(x, low, high)


def sign(op, x):
    """Add the nodes that give -1, 0 or 1."""
    if op.dtype(x) != torch.int64:
        return op.Sign(x)
    zero = op.like(x, 0)
    return op.Sub(*(op.cast(op.node(kind, x, zero), torch.int64) for kind in ("Greater", "Less")))


def extreme_over(op, op_type: str, x, over, *, keepdims: bool):
    """Add the nodes that reduce to the largest (``"ReduceMax"``) or smallest element, over sides or, of None, all."""
    if op.dtype(x) != torch.int64:
        return op.node(op_type, x, over, keepdims=keepdims)
    half, middle = op.like(x, HALF), op.like(x, HALF // 2)
    low = op.Mod(x, half)
    high = op.Div(op.Sub(x, low), half)
    best = op.node(op_type, high, over, keepdims=True)
    never = op.like(x, -HALF // 2 if op_type == "ReduceMax" else HALF // 2 - 1)
    below = op.node(op_type, op.Where(op.Equal(high, best), op.Sub(low, middle), never), over, keepdims=True)
    found = op.Add(op.Mul(best, half), op.Add(below, middle))
    return found if keepdims else op.Squeeze(found, over)
