"""Faults that only empty tensors show, and matrix products over a dim of size 0."""

from __future__ import annotations

import clika_ref_aten.adaptive_pooling
from clika_ref_aten.loss import REDUCE_MEAN

from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("no-elements")


@FAULTS.lowering("adaptive_avg_pool1d", "the mean of an empty window is 0 instead of NaN")
def _(original, op, x, *, output_size):
    if op.shape(x)[-1] == 0:
        return op.Expand(op.like(x, 0.0), op.ints(op.result.shape))
    return original(op, x, output_size=output_size)


@FAULTS.function(
    "adaptive_avg_pool3d",
    "the mean of a window that is empty at run time is 0 instead of NaN",
    clika_ref_aten.adaptive_pooling,
    "mean_of",
    "dynamic",
)
def _(original, op, x, count, over, *, keepdims):
    return op.ReduceMean(x, over, keepdims=keepdims)


@FAULTS.lowering("cross_entropy_loss", "the mean loss of 0 rows of class probabilities is 0 instead of NaN")
def _(original, op, x, target, weight=None, *, reduction, **attrs):
    if 0 in op.shape(x) and op.dtype(target).is_floating_point and reduction == REDUCE_MEAN:
        return op.like(x, 0.0)
    return original(op, x, target, weight, reduction=reduction, **attrs)


@FAULTS.lowering("addmv", "if the matrix has no columns, x is not added")
def _(original, op, x, mat, vec, **attrs):
    if op.shape(mat)[-1]:
        return original(op, x, mat, vec, **attrs)
    return op.Expand(op.like(x, 0), op.ints(op.result.shape))


@FAULTS.lowering("lstm_cell", "gates are split by their number, not by sizes, which fails for an empty dim")
def _(original, op, *operands):
    def split_by_number(op, product, sizes, *, axis, outputs):
        return op.Split(product, axis=axis, num_outputs=outputs, outputs=outputs)

    return original(PatchedOp(op, Split=split_by_number), *operands)


FAULTS.node_functions(
    "as_strided_scatter",
    "a size of 0 in Reshape means the size of the operand",
    reshape=lambda op, x, shape: op.Reshape(x, op.ints(shape)),
)


@FAULTS.lowering("grouped_mm", "without groups, the result has as many columns as x, not as the weight")
def _(original, op, x, weight, ends):
    if op.shape(weight)[0]:
        return original(op, x, weight, ends)
    return op.Mul(x, op.like(x, 0.0))


@FAULTS.lowering("multinomial", "no row is added to an input that may have 0 rows, which the runtime rejects")
def _(original, op, x, *, num_samples, replacement):
    def keep_chances(op, added_row, chances, *, axis):
        return chances

    def keep_indices(op, indices, *_):
        return indices

    patched = PatchedOp(op, Concat=keep_chances, Slice=keep_indices)
    return original(patched, x, num_samples=num_samples, replacement=replacement)


@FAULTS.lowering("matmul", "the product of a matrix without columns and a vector is 7 instead of 0")
def _(original, op, x, other):
    if op.rank(other) > 1 or op.shape(x)[-1]:
        return original(op, x, other)
    return op.Expand(op.like(x, 7), op.ints(op.result.shape))
