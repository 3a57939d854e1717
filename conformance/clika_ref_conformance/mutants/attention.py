"""Faults of attention, recurrent networks and matrix products."""

from __future__ import annotations

import math
from unittest.mock import patch

import clika_ref_aten.attention
import torch

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("attention")
ATTENTION = "scaled_dot_product_attention"


FAULTS.node_functions(ATTENTION, "a row without any key gives NaN", Not=lambda op, dead: op.Or(dead, op.Not(dead)))


@FAULTS.lowering(ATTENTION, "a row without any key gives the mean of the values")
def _(original, op, x, key, value, mask=None, **attrs):
    with patch.object(clika_ref_aten.attention, "MASKED_SCORE", -1e30):
        altered = PatchedOp(op, Not=lambda op, dead: op.Or(dead, op.Not(dead)))
        return original(altered, x, key, value, mask, **attrs)


@FAULTS.function(
    ATTENTION, "the causal mask is aligned at the bottom right", clika_ref_aten.attention, "_causal_mask", "operators"
)
def _(original, op, rows, columns):
    kept = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    return op.constant(kept, torch.bool)


FAULTS.attribute_values(ATTENTION, "scale is ignored", scale=None)


@FAULTS.lowering(ATTENTION, "the default scale is computed from the width of the values")
def _(original, op, x, key, value, *mask, scale, **attrs):
    default = 1 / math.sqrt(op.shape(value)[-1])
    return original(op, x, key, value, *mask, scale=default if scale is None else scale, **attrs)


@FAULTS.lowering(ATTENTION, "shared heads are repeated in turn instead of for neighboring query heads")
def _(original, op, x, key, value, *mask, enable_gqa, **attrs):
    def repeat_heads(op, shared):
        shape = op.shape(shared)
        times = op.shape(x)[-3] // shape[-3]
        tiled = op.Tile(shared, op.ints([times if i == len(shape) - 3 else 1 for i in range(len(shape))]))
        return op.declare(tiled, TensorType(op.dtype(shared), (*shape[:-3], shape[-3] * times, *shape[-2:])))

    if enable_gqa:
        key, value = repeat_heads(op, key), repeat_heads(op, value)
    return original(op, x, key, value, *mask, enable_gqa=False, **attrs)


@FAULTS.lowering(ATTENTION, "a boolean mask is added as 0 and 1")
def _(original, op, x, key, value, mask=None, **attrs):
    if mask is not None and op.dtype(mask) == torch.bool:
        shape = op.shape(mask)
        mask = op.declare(op.cast(mask, op.dtype(x)), TensorType(op.dtype(x), shape))
    return original(op, x, key, value, mask, **attrs)


@FAULTS.lowering(ATTENTION, "the mask is ignored for grouped-query attention")
def _(original, op, x, key, value, mask=None, *, enable_gqa, **attrs):
    return original(op, x, key, value, None if enable_gqa else mask, enable_gqa=enable_gqa, **attrs)


FAULTS.node_attributes(
    "gru", "the reset gate is applied before the product, as ONNX does by default", "GRU", linear_before_reset=None
)


@FAULTS.lowering("lstm", "the gates stay in the order of PyTorch")
def _(original, op, x, h, c, *params, **attrs):
    def write(op, value, *sizes, **how):
        parts = op.Split(value, *sizes, **how)
        return [parts[i] for i in (0, 2, 3, 1)] if how.get("num_outputs") == 4 else parts

    return original(PatchedOp(op, Split=write), x, h, c, *params, **attrs)


@FAULTS.lowering("lstm", "the initial hidden and cell states are swapped")
def _(original, op, x, h, c, *params, **attrs):
    return original(op, x, c, h, *params, **attrs)


@FAULTS.lowering("linear", "the product is computed in FP16")
def _(original, op, x, weight, *bias):
    def compute_in_half(op_type):
        def write(op, *operands, **how):
            halves = op.promote(*(o for o in operands if o is not None), to=torch.float16)
            return op.cast(op.node(op_type, *halves, **how), op.dtype(x))

        return write

    return original(PatchedOp(op, MatMul=compute_in_half("MatMul"), Gemm=compute_in_half("Gemm")), x, weight, *bias)


@FAULTS.lowering("matmul", "operands are rounded to bfloat16 first")
def _(original, op, x, other):
    def write(op, *operands):
        return op.MatMul(*(op.cast(op.cast(v, torch.bfloat16), op.dtype(v)) for v in operands))

    return original(PatchedOp(op, MatMul=write), x, other)


@FAULTS.lowering("addmm", "alpha scales the sum, not the product")
def _(original, op, x, mat1, mat2, *, beta, alpha):
    total = original(op, x, mat1, mat2, beta=beta, alpha=1)
    return op.Mul(total, op.cast(op.scalar(alpha, torch.float32), op.result.dtype))


@FAULTS.lowering("addmm", "a beta of 0 still propagates NaN of the ignored operand")
def _(original, op, x, mat1, mat2, *, beta, alpha):
    if beta:
        return original(op, x, mat1, mat2, beta=beta, alpha=alpha)
    off = op.Mul(x, op.like(x, 0))
    return op.Add(original(op, x, mat1, mat2, beta=beta, alpha=alpha), off)
