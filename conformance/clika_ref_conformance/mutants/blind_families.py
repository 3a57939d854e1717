"""Faults in operators, types and passes, by an author without knowledge of samples and tests."""

from __future__ import annotations

import math

import torch
from clika_ref_aten.reduction import axes_operand, count_reduced
from clika_ref_aten.spatial import ceil_divide, expand_per_dim, pad_zeros
from clika_ref_cleanup import fold_constants, remove_detach, remove_dropout

from clika_ref.core.ir import Value
from clika_ref.core.rewriter import Skip
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("blind-families", blind=True)

BEFORE_FIRST, AFTER_LAST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
"""Slice ends: before the first element, when stepping backwards, and after the last one."""


# Bounds


@FAULTS.lowering("clamp", "the upper bound is applied first, so the result is the lower bound if the two cross")
def _(original, op, x, min=None, max=None):
    if min is None or max is None:
        return original(op, x, min, max)
    return original(op, original(op, x, None, max), min, None)


# Casting


@FAULTS.lowering("to", "casts from float to integer round to the nearest number instead of truncating")
def _(original, op, x, *, dtype):
    whole = not dtype.is_floating_point and dtype != torch.bool
    return original(op, op.Round(x) if whole and op.dtype(x).is_floating_point else x, dtype=dtype)


# Comparison


@FAULTS.lowering("lt", "a number with a fraction is truncated if the tensor has integers")
def _(original, op, x, y):
    cut = isinstance(y, float) and math.isfinite(y) and not op.dtype(x).is_floating_point
    return original(op, x, int(y) if cut else y)


# Counting


FAULTS.attribute_values("bincount", "minlength is ignored", minlength=0)


# Creation


@FAULTS.lowering("full", "the number passes through float32, which rounds integers beyond 2 ** 24")
def _(original, op, *, fill_value, **attrs):
    if not is_symbolic(fill_value) and abs(fill_value) < 2**62:
        fill_value = type(fill_value)(torch.tensor(fill_value, dtype=torch.float32).item())
    return original(op, fill_value=fill_value, **attrs)


# Cumulative operators


@FAULTS.lowering("cumprod", "logarithms are summed, so elements after a negative one are NaN")
def _(original, op, x, *, dim, dtype):
    if op.rank(x) == 0 or op.result.dtype not in (torch.float32, torch.float64):
        return original(op, x, dim=dim, dtype=dtype)
    (factors,) = op.promote(x)
    return op.Exp(op.CumSum(op.Log(factors), op.constant(dim, torch.int64)))


# Diagonals


@FAULTS.lowering("diag", "diagonals below the main one are read as those above it")
def _(original, op, x, *, diagonal):
    return original(op, x, diagonal=abs(diagonal) if op.rank(x) == 2 else diagonal)


# Arithmetic


@FAULTS.lowering("fmod", "a remainder of integers has the sign of the divisor, as in ONNX by default")
def _(original, op, x, y):
    if op.result.dtype not in (torch.int64, torch.int32):
        return original(op, x, y)
    return op.Mod(*op.promote(x, y))


@FAULTS.lowering("sub", "if a tensor is subtracted from a number, alpha multiplies the number")
def _(original, op, x, y, *, alpha):
    if not isinstance(x, int | float) or is_symbolic(alpha):
        return original(op, x, y, alpha=alpha)
    return original(op, x * alpha, y, alpha=1)


# Exponentials and gates


FAULTS.node_functions(
    "logit",
    "eps is only applied as a lower bound",
    Greater=lambda op, x, high: op.Xor(op.Greater(x, high), op.Greater(x, high)),
)


FAULTS.attribute_values("gelu", "approximate='tanh' is ignored", approximate="none")


# Fold and unfold


@FAULTS.lowering("col2im", "overlapping elements of windows are averaged instead of summed")
def _(original, op, x, **attrs):
    known = TensorType(op.dtype(x), op.shape(x))
    ones = op.declare(op.Expand(op.like(x, 1), op.Shape(x)), known)
    counts = original(op, ones, **attrs)
    return op.Div(original(op, x, **attrs), op.Max(counts, op.like(x, 1)))


# Indexing and scattering


@FAULTS.lowering("index", "the result dims of indices on non-adjacent dims are at the first of them")
def _(original, op, x, *indices):
    found, given = original(op, x, *indices), [d for d, i in enumerate(indices) if i is not None]
    masks = any(op.dtype(indices[d]) in (torch.bool, torch.uint8) for d in given)
    if masks or given[-1] - given[0] < len(given) or given[0] == 0:
        return found
    rank, moved = op.result.rank, max(op.rank(indices[d]) for d in given)
    before = range(moved, moved + given[0])
    return op.Transpose(found, perm=[*before, *range(moved), *range(moved + given[0], rank)])


@FAULTS.lowering("masked_fill", "an infinite value becomes the largest or smallest finite number")
def _(original, op, x, mask, value):
    if isinstance(value, float) and math.isinf(value) and op.dtype(x).is_floating_point:
        value = math.copysign(torch.finfo(op.dtype(x)).max, value)
    return original(op, x, mask, value)


@FAULTS.lowering("scatter", "the last elements of a source larger than the index are used")
def _(original, op, x, index, src, *, dim):
    if isinstance(src, int | float) or is_symbolic((src, op.shape(src), op.shape(index))) or not op.rank(src):
        return original(op, x, index, src, dim=dim)
    wanted = op.shape(index) or (1,)
    starts = [a - b for a, b in zip(op.shape(src), wanted, strict=True)]
    rest = op.Slice(src, op.ints(starts), op.ints([AFTER_LAST] * len(starts)))
    return original(op, x, index, op.declare(rest, TensorType(op.dtype(src), wanted)), dim=dim)


# Concatenation


@FAULTS.lowering("stack", "a negative dim counts from the last dim of the operands instead of the result")
def _(original, op, *tensors, dim):
    return original(op, *tensors, dim=dim + op.rank(tensors[0]) if dim < 0 else dim)


# Matrix products


@FAULTS.lowering("linear", "the bias is ignored if the operand is a vector")
def _(original, op, x, weight, bias=None):
    return original(op, x, weight, None if op.rank(x) == 1 else bias)


# Logic


@FAULTS.lowering("logical_xor", "negative numbers count as false")
def _(original, op, x, y):
    ordered = (torch.float32, torch.float64, torch.int64, torch.int32)
    if op.dtype(x) not in ordered or op.dtype(y) not in ordered:
        return original(op, x, y)
    return op.Xor(*(op.Greater(v, op.like(v, 0)) for v in (x, y)))


# Normalization


@FAULTS.lowering("batch_norm", "training divides by the unbiased variance")
def _(original, op, x, *vectors, training, momentum, eps):
    shape = op.shape(x)
    count = 1 if is_symbolic(shape) else math.prod(size for i, size in enumerate(shape) if i != 1)
    if training and count > 1:
        factor = count / (count - 1)

        def compute_unbiased_std(op, total):
            return op.Sqrt(op.Add(op.Mul(total, op.like(total, factor)), op.like(total, eps * (1 - factor))))

        op = PatchedOp(op, Sqrt=compute_unbiased_std)
    return original(op, x, *vectors, training=training, momentum=momentum, eps=eps)


# Sorting


@FAULTS.lowering("topk", "the smallest elements are returned in descending order")
def _(original, op, x, *, dim, largest, sorted, **attrs):
    found = original(op, x, dim=dim, largest=largest, sorted=sorted, **attrs)
    if largest or not sorted or op.rank(x) == 0:
        return found
    back = [op.ints([n]) for n in (-1, BEFORE_FIRST, dim, -1)]
    return tuple(op.Slice(part, *back) for part in found)


# Pooling


@FAULTS.lowering("max_pool1d", "the padding is zeros, which are larger than negative elements")
def _(original, op, x, *, padding, ceil_mode, **attrs):
    if ceil_mode or not op.dtype(x).is_floating_point:
        return original(op, x, padding=padding, ceil_mode=ceil_mode, **attrs)
    return original(op, pad_zeros(op, x, padding, padding), padding=(0,), ceil_mode=ceil_mode, **attrs)


# Powers


@FAULTS.lowering("pow", "powers of integers are computed in float32, which rounds them")
def _(original, op, x, y):
    if op.result.dtype not in (torch.int64, torch.int32):
        return original(op, x, y)
    return op.cast(op.Pow(*op.promote(x, y, to=torch.float32)), op.result.dtype)


# Reductions


@FAULTS.lowering("amax", "int64 is compared and returned as float32, which rounds it")
def _(original, op, x, *, dim, keepdim):
    if op.dtype(x) != torch.int64:
        return original(op, x, dim=dim, keepdim=keepdim)
    found = op.ReduceMax(op.cast(x, torch.float32), axes_operand(op, x, dim), keepdims=keepdim)
    return op.cast(found, torch.int64)


@FAULTS.lowering("mean", "integers are averaged before they are converted to the requested dtype")
def _(original, op, x, *, dim, keepdim, dtype):
    count = count_reduced(op.shape(x), dim)
    if op.dtype(x) not in (torch.int64, torch.int32) or is_symbolic(count) or not count:
        return original(op, x, dim=dim, keepdim=keepdim, dtype=dtype)
    total = op.ReduceSum(op.cast(x, torch.int64), axes_operand(op, x, dim), keepdims=keepdim)
    return op.cast(op.Div(total, op.like(total, count)), op.result.dtype)


@FAULTS.lowering("logsumexp", "nothing is subtracted before the exponential, which overflows")
def _(original, op, x, *, dim, keepdim):
    if op.dtype(x) not in (torch.float32, torch.float64):
        return original(op, x, dim=dim, keepdim=keepdim)
    return op.Log(op.ReduceSum(op.Exp(x), axes_operand(op, x, dim), keepdims=keepdim))


# Rounding


@FAULTS.lowering("trunc", "negative numbers are rounded down")
def _(original, op, x):
    return op.Floor(x) if op.dtype(x).is_floating_point else original(op, x)


# Strides


FAULTS.attribute_values("as_strided", "storage_offset is ignored", storage_offset=0)


# Hyperbolic functions


@FAULTS.lowering("asinh", "it is computed from its definition by a logarithm, which cancels for large negative numbers")
def _(original, op, x):
    (x,) = op.promote(x)
    return op.Log(op.Add(x, op.Sqrt(op.Add(op.Mul(x, x), op.like(x, 1)))))


# Losses


FAULTS.node_functions(
    "multilabel_margin_loss", "classes after the first -1 count, too", CumSum=lambda op, ends, axis: ends
)


# Convolutions


@FAULTS.lowering("conv2d", "padding='same' adds the odd element at the start instead of the end")
def _(original, op, *operands, padding, **attrs):
    def before(op, *operands, pads, **how):
        return op.Conv(*operands, pads=[*pads[len(pads) // 2 :], *pads[: len(pads) // 2]], **how)

    return original(PatchedOp(op, Conv=before) if padding == "same" else op, *operands, padding=padding, **attrs)


@FAULTS.lowering("conv_transpose1d", "output_padding lengthens the result at its start instead of its end")
def _(original, op, *operands, **attrs):
    def at_start(op, *operands, pads, output_padding, **how):
        (begin, end), (more,) = pads, output_padding
        if more <= begin:
            begin, more = begin - more, 0
        return op.ConvTranspose(*operands, pads=[begin, end], output_padding=[more], **how)

    return original(PatchedOp(op, ConvTranspose=at_start), *operands, **attrs)


# Recurrent cells


@FAULTS.lowering("lstm_cell", "the gates are read in the order of ONNX: input, output, forget, cell")
def _(original, op, *operands):
    def in_order(op, *operands, **how):
        enter, leave, forget, cell = op.Split(*operands, **how)
        return enter, forget, cell, leave

    return original(PatchedOp(op, Split=in_order), *operands)


# Activations


@FAULTS.lowering("prelu", "weights are applied along the last dim instead of the channels if their number fits it")
def _(original, op, x, weight):
    if op.rank(x) < 3 or op.shape(x)[-1:] != op.shape(weight):
        return original(op, x, weight)
    return op.PRelu(x, weight)


# Types


@FAULTS.type_rule("max_pool2d", "with ceil_mode, a last window that starts after a dynamic dim counts")
def _(original, x, *, kernel_size, stride, padding, dilation, ceil_mode):
    attrs = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    found = original(x, **attrs, ceil_mode=ceil_mode)
    known = found[0] if isinstance(found, tuple) else found
    if not ceil_mode or not is_symbolic(x.shape[-2:]):
        return found
    kernel = expand_per_dim(kernel_size, 2)
    columns = (
        x.shape[-2:],
        kernel,
        expand_per_dim(stride or kernel, 2),
        expand_per_dim(padding, 2),
        expand_per_dim(dilation, 2),
    )
    counts = [ceil_divide(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, s, p, d in zip(*columns, strict=True)]
    shape = [c if is_symbolic(n) else own for c, n, own in zip(counts, x.shape[-2:], known.shape[-2:], strict=True)]
    return TensorType(x.dtype, (*x.shape[:-2], *shape))


@FAULTS.type_rule("conv_transpose3d", "output_padding is ignored if a dim is dynamic")
def _(original, x, weight, bias=None, *, output_padding, **attrs):
    kept = (0, 0, 0) if is_symbolic(x.shape[-3:]) else output_padding
    return original(x, weight, bias, output_padding=kept, **attrs)


# Passes


@FAULTS.rule(
    "remove-dropout", "a probability of 1 is treated as that of keeping elements", remove_dropout, "remove_dropout"
)
def _(original, node, build):
    return node.inputs[0] if node.attrs["p"] == 1 else original(node, build)


FAULTS.substitute(
    "fold-literals",
    "parameters are treated as literals, so training them has no effect",
    fold_constants,
    "is_literal",
    lambda value: True,
)


@FAULTS.rule("remove-detach", "writes through a detached tensor are lost", remove_detach, "remove_overwritten")
def _(original, node, build):
    old = node.inputs[1]
    return old if isinstance(old, Value) and old.type == node.output.type else Skip("dtypes are converted, too")
