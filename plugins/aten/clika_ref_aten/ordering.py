"""Maximum, minimum, clip and sign, also for int64.

For int64 with equal upper halves, Max, Min, Clip, Relu, Sign, ReduceMax and ReduceMin of ONNX Runtime 1.31 compare the
lower halves as signed integers, so that 2 ** 31 is less than 0. Less, Greater and Equal are correct.
"""

from __future__ import annotations

import torch

from clika_ref_aten.elementwise import add_node_via

HALF_RANGE = 2**32
"""The number of values of one 32-bit half of an int64."""


def lower_min_max(op, op_type: str, x, y):
    """Return the elementwise maximum (``"Max"``) or minimum (``"Min"``); NaN where one is NaN."""
    if op.dtype(x) == torch.int64:
        return op.Where(op.node("Greater" if op_type == "Max" else "Less", x, y), x, y)
    return add_node_via(op, op_type, x, y, via={torch.int16: torch.int32})  # ONNX Runtime has no int16 kernel


def lower_clip(op, x, low, high):
    """Clamp ``x`` between two finite bounds."""
    low, high = op.like(x, low), op.like(x, high)
    if op.dtype(x) == torch.int64:
        return lower_min_max(op, "Min", lower_min_max(op, "Max", x, low), high)
    return op.Clip(x, low, high)


def lower_sign(op, x):
    """Return -1, 0 or 1 by the sign of ``x``."""
    if op.dtype(x) != torch.int64:
        return op.Sign(x)
    zero = op.like(x, 0)
    return op.Sub(*(op.cast(op.node(kind, x, zero), torch.int64) for kind in ("Greater", "Less")))


def reduce_min_max(op, op_type: str, x, over, *, keepdims: bool):
    """Reduce ``x`` to its maximum (``"ReduceMax"``) or minimum (``"ReduceMin"``) over the dims ``over`` (None: all)."""
    if op.dtype(x) != torch.int64:
        return op.node(op_type, x, over, keepdims=keepdims)
    half, middle = op.like(x, HALF_RANGE), op.like(x, HALF_RANGE // 2)
    low = op.Mod(x, half)
    high = op.Div(op.Sub(x, low), half)
    best = op.node(op_type, high, over, keepdims=True)
    never = op.like(x, -HALF_RANGE // 2 if op_type == "ReduceMax" else HALF_RANGE // 2 - 1)
    below = op.node(op_type, op.Where(op.Equal(high, best), op.Sub(low, middle), never), over, keepdims=True)
    found = op.Add(op.Mul(best, half), op.Add(below, middle))
    return found if keepdims else op.Squeeze(found, over)
