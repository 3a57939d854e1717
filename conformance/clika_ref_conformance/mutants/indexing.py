"""Faults of slicing, indexing, sorting, scattering and moving elements."""

from __future__ import annotations

import clika_ref_aten.slicing
import clika_ref_aten.sorting
import sympy
import torch
from clika_ref_aten.size_arithmetic import OPEN_END, replace_dim

from clika_ref_conformance.mutants.patched_op import PatchedOp, override_attributes
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("indexing")


@FAULTS.lowering("slice", "a start before the first element wraps around once more")
def _(original, op, x, *, dim, start, **attrs):
    size = op.shape(x)[dim]
    wrapped = start % size if isinstance(start, int) and isinstance(size, int) and start < -size else start
    return original(op, x, dim=dim, start=wrapped, **attrs)


@FAULTS.lowering("slice_scatter", "step is ignored if the source has one element")
def _(original, op, x, src, *, dim, start, end, step):
    if step > 1 and op.shape(src)[dim] > 1:
        start = 0 if start is None else start
        step, end = 1, start + op.shape(src)[dim]
    return original(op, x, src, dim=dim, start=start, end=end, step=step)


@FAULTS.function(
    "select_scatter", "the index -1 ends at element 0", clika_ref_aten.slicing, "overwrite_slice", "operators"
)
def _(original, op, x, src, dim, *, start, end, step=1):
    return original(op, x, src, dim, start=start, end=0 if start == -1 and end == OPEN_END else end, step=step)


@FAULTS.lowering("select", "a negative index counts from the last but one")
def _(original, op, x, *, dim, index):
    last = op.shape(x)[dim] - 1
    return original(op, x, dim=dim, index=max(index + last, 0) if index < 0 else index)


FAULTS.node_functions(
    "index", "negative indices of later dims do not wrap around", Mod=lambda op, entry, side: op.Identity(entry)
)


FAULTS.attribute_values("index_put", "accumulate overwrites", accumulate=False)


@FAULTS.lowering("index_add", "the last of two sources of one position is written")
def _(original, op, x, index, source, **attrs):
    return original(override_attributes(PatchedOp(op), "ScatterElements", reduction=None), x, index, source, **attrs)


FAULTS.attribute_values("index_add", "alpha is ignored", alpha=1)


FAULTS.attribute_values("topk", "largest is ignored", largest=True)


@FAULTS.lowering("sort", "equal elements are returned in reverse order")
def _(original, op, x, **attrs):
    def write(op, x, k, *, axis, largest, outputs, **how):
        values, positions = op.TopK(x, k, axis=axis, largest=not largest, outputs=2, **how)
        ends = (op.ints([-1]), op.ints([-OPEN_END]), op.ints([axis]), op.ints([-1]))
        return op.Slice(values, *ends), op.Slice(positions, *ends)

    return original(PatchedOp(op, TopK=write), x, **attrs)


@FAULTS.function(
    "median",
    "the median of an even number of elements is the upper middle one",
    clika_ref_aten.sorting,
    "FloorDiv",
    "operators",
)
def _(original, count, two):
    return original(count - 1, two) + 1


@FAULTS.lowering("kthvalue", "k counts from 0")
def _(original, op, x, *, k, **attrs):
    return original(op, x, k=k + 1 if op.rank(x) and k < op.shape(x)[attrs["dim"]] else k, **attrs)


FAULTS.node_attributes("argmax", "the last of equal elements is returned", "ArgMax", select_last_index=1)


FAULTS.attribute_values("scatter_reduce", "include_self is ignored", include_self=True)


FAULTS.node_functions(
    "scatter",
    "sources are read from the end of the dim",
    ScatterElements=lambda op, x, index, src, **how: op.ScatterElements(x, index, src, axis=-1),
)


FAULTS.attribute_values("gather", "the dim is always the last", dim=-1)


FAULTS.attribute_values("embedding_bag", "padding_idx counts like any other row", padding_idx=None)


FAULTS.node_functions(
    "searchsorted",
    "the dim of the sum is counted from the last, which is wrong for an empty sum",
    ReduceSum=lambda op, passed, _axes, **given: op.ReduceSum(passed, op.ints([-1]), **given),
)


FAULTS.attribute_values("searchsorted", "right is ignored", right=False)


FAULTS.attribute_values("tril", "diagonal is ignored", diagonal=0)


@FAULTS.lowering("roll", "elements are rolled in the other direction")
def _(original, op, x, *, shifts, dims):
    return original(op, x, shifts=tuple(-n for n in shifts), dims=dims)


@FAULTS.lowering("flip", "only the first dim is reversed")
def _(original, op, x, *, dims):
    return original(op, x, dims=dims[:1])


@FAULTS.lowering("repeat_interleave", "the whole tensor is repeated, not each element")
def _(original, op, x, repeats, *, dim, **attrs):
    if not isinstance(repeats, int) or dim is None:
        return original(op, x, repeats, dim=dim, **attrs)
    return op.Tile(x, op.ints([repeats if i == dim % op.rank(x) else 1 for i in range(op.rank(x))]))


@FAULTS.lowering("permute", "the inverse permutation is applied")
def _(original, op, x, *, dims):
    order = [d % len(dims) for d in dims]
    return original(op, x, dims=tuple(sorted(range(len(order)), key=order.__getitem__)))


@FAULTS.lowering("unfold", "windows follow each other without overlap")
def _(original, op, x, *, dimension, size, step):
    rank = op.rank(x)
    if not rank:
        return original(op, x, dimension=dimension, size=size, step=step)
    dim = dimension % rank
    starts = torch.arange(op.result.shape[dim])[:, None] * size + torch.arange(size)
    positions = starts.clamp(max=op.shape(x)[dim] - 1)
    order = [i for i in range(rank + 1) if i != dim + 1]
    return op.Transpose(op.Gather(x, op.constant(positions, torch.int64), axis=dim), perm=[*order, dim + 1])


FAULTS.node_functions(
    "take_along_dim",
    "indices beyond the dim and negative ones do not wrap around",
    Mod=lambda op, places, length: places,
)


@FAULTS.lowering(
    "slice", "a start before the first element of a dynamic dim wraps around once more", levels=("dynamic",)
)
def _(original, op, x, *, dim, start, **attrs):
    size = op.shape(x)[dim]
    wraps = isinstance(start, int) and start < 0 and not isinstance(size, int)
    return original(op, x, dim=dim, start=size + start if wraps else start, **attrs)


@FAULTS.type_rule("slice", "a start that is a negative expression is treated as within the dim")
def _(original, x, *, dim, start, end, step):
    if not isinstance(start, sympy.Basic) or not start.is_negative:
        return original(x, dim=dim, start=start, end=end, step=step)
    whole = original(x, dim=dim, start=0, end=end, step=1).shape[dim] - start
    return replace_dim(x, dim, (whole + step - 1) // step)


@FAULTS.function(
    "slice_scatter",
    "the parts before and after a slice are joined, although start and end count from different ends",
    clika_ref_aten.slicing,
    "_is_contiguous",
    "blocks",
)
def _(original, start, end):
    return original(start, end) or (isinstance(start, int) and isinstance(end, int) and start <= end)
