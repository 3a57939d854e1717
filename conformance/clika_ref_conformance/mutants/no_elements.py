"""Faults that only show with empty tensors, and in products without terms."""

from __future__ import annotations

import clika_ref_aten.adaptive_pooling
from clika_ref_aten.loss import REDUCE_MEAN

from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("no-elements")


@FAULTS.lowering("adaptive_avg_pool1d", "the mean of an empty window is 0")
def _(original, op, x, *, output_size):
    if op.shape(x)[-1] == 0:
        return op.Expand(op.like(x, 0.0), op.ints(op.result.shape))
    return original(op, x, output_size=output_size)


@FAULTS.function(
    "adaptive_avg_pool3d",
    "the mean of a window that is empty at run time is 0",
    clika_ref_aten.adaptive_pooling,
    "mean_of",
    "dynamic",
)
def _(original, op, x, count, over, *, keepdims):
    return op.ReduceMean(x, over, keepdims=keepdims)


@FAULTS.lowering("cross_entropy_loss", "the mean over no rows of probabilities is 0")
def _(original, op, x, target, weight=None, *, reduction, **attrs):
    if 0 in op.shape(x) and op.dtype(target).is_floating_point and reduction == REDUCE_MEAN:
        return op.like(x, 0.0)
    return original(op, x, target, weight, reduction=reduction, **attrs)


@FAULTS.lowering("addmv", "the operand that an empty product is added to is omitted")
def _(original, op, x, mat, vec, **attrs):
    if op.shape(mat)[-1]:
        return original(op, x, mat, vec, **attrs)
    return op.Expand(op.like(x, 0), op.ints(op.result.shape))


@FAULTS.lowering("lstm_cell", "gates are split into equal parts, which fails for an empty dim")
def _(original, op, *operands):
    def cut(op, product, sizes, *, axis, outputs):
        return op.Split(product, axis=axis, num_outputs=outputs, outputs=outputs)

    return original(PatchedOp(op, Split=cut), *operands)


FAULTS.node_functions(
    "as_strided_scatter",
    "a length of 0 is treated as unchanged",
    reshape=lambda op, x, shape: op.Reshape(x, op.ints(shape)),
)


@FAULTS.lowering("grouped_mm", "without groups, the result has the width of the rows")
def _(original, op, x, weight, ends):
    if op.shape(weight)[0]:
        return original(op, x, weight, ends)
    return op.Mul(x, op.like(x, 0.0))


@FAULTS.lowering("multinomial", "numbers are drawn from no rows, which the runtime rejects")
def _(original, op, x, *, num_samples, replacement):
    def slice_nothing(op, picked, *_):
        return picked

    def concat_nothing(op, row, chances, *, axis):
        return chances

    altered = PatchedOp(op, Slice=slice_nothing, Concat=concat_nothing)
    return original(altered, x, num_samples=num_samples, replacement=replacement)


@FAULTS.lowering("matmul", "an empty product with a vector is undefined memory")
def _(original, op, x, other):
    if op.rank(other) > 1 or op.shape(x)[-1]:
        return original(op, x, other)
    return op.Expand(op.like(x, 7), op.ints(op.result.shape))
