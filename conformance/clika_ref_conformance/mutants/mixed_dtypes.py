"""Faults with operands of different float dtypes, tensors of low rank, and empty tensors."""

from __future__ import annotations

import torch

from clika_ref_conformance.mutants.attention import ATTENTION
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("mixed-dtypes")


@FAULTS.lowering("soft_margin_loss", "a target of another dtype is not cast")
@FAULTS.lowering("huber_loss", "a target of another dtype is not cast")
@FAULTS.lowering("cross_entropy_loss", "probabilities of another dtype are not cast")
@FAULTS.lowering("weight_norm", "a factor of another dtype is not cast")
@FAULTS.lowering("addr", "vectors are not cast to the dtype of the matrix")
def _(original, op, *operands, **attrs):
    def promote(op, *operands, to=None):
        return operands if to is None else op.promote(*operands, to=to)

    return original(PatchedOp(op, promote=promote), *operands, **attrs)


@FAULTS.lowering("weight_norm", "the elements of a vector share one norm")
def _(original, op, v, g, *, dim):
    if op.rank(v) > 1 or dim == -1:
        return original(op, v, g, dim=dim)
    v, g = op.promote(v, g)
    return op.Mul(v, op.Div(g, op.ReduceL2(v, keepdims=1)))


@FAULTS.lowering("histc", "equal elements are found between x - 1 and x + 1, which may equal x")
def _(original, op, x, *, bins, min, max):
    if min != max:
        return original(op, x, bins=bins, min=min, max=max)
    (one,) = op.promote(1, to=op.dtype(x))
    least = PatchedOp(op, ReduceMin=lambda op, x, **how: op.Sub(op.ReduceMin(x, **how), one))
    most = PatchedOp(least, ReduceMax=lambda op, x, **how: op.Add(op.ReduceMax(x, **how), one))
    return original(most, x, bins=bins, min=min, max=max)


FAULTS.node_functions(
    "take_along_dim", "indices into an empty tensor wrap around its size, 0", Max=lambda op, length, least: length
)


@FAULTS.lowering("addr", "bools are summed without a cast")
def _(original, op, x, vec1, vec2, *, beta, alpha):
    if op.result.dtype != torch.bool:
        return original(op, x, vec1, vec2, beta=beta, alpha=alpha)
    return op.And(x, op.And(op.Unsqueeze(vec1, op.ints([1])), vec2))


@FAULTS.lowering(ATTENTION, "the maximum of a mask without keys is added")
def _(original, op, x, key, value, mask=None, **attrs):
    found = original(op, x, key, value, mask, **attrs)
    if mask is None or op.shape(key)[-2] != 0:
        return found
    largest = op.ReduceMax(op.cast(mask, op.dtype(x)), op.ints([-1]), keepdims=1)
    return op.Add(found, largest)
