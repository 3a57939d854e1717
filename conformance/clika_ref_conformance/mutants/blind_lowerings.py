"""Faulty lowerings, written without knowledge of the samples and tests that must find them."""

from __future__ import annotations

import math

import torch

from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("blind-lowerings", blind=True)

MEAN, SUM = 1, 2
"""PyTorch's reduction codes of losses."""


# Activations


@FAULTS.lowering("hardsigmoid", "the slope is ONNX's default, 0.2, instead of 1/6")
def _(original, op, x):
    return op.HardSigmoid(x)


@FAULTS.lowering("celu", "alpha scales the exponential, but does not divide its exponent, as in elu")
def _(original, op, x, *, alpha):
    return op.Elu(x, alpha=float(alpha))


@FAULTS.lowering("softshrink", "NaN becomes 0, since its comparison with the bound is false")
def _(original, op, x, *, lambd):
    beyond = op.Greater(op.Abs(x), op.like(x, lambd))
    return op.Where(beyond, original(op, x, lambd=lambd), op.like(x, 0))


FAULTS.node_functions(
    "hardshrink", "elements exactly at the bound are kept", LessOrEqual=lambda op, *operands: op.Less(*operands)
)


@FAULTS.lowering("softplus", "the threshold is compared with x instead of beta * x")
def _(original, op, x, *, beta, threshold):
    return original(
        PatchedOp(op, Greater=lambda op, scaled, bound: op.Greater(x, bound)), x, beta=beta, threshold=threshold
    )


@FAULTS.lowering("softmax", "it normalizes over all dims from dim on, as ONNX did before opset 13")
def _(original, op, x, *, dim, dtype):
    rank = op.rank(x)
    if rank < 2 or dim % rank == rank - 1:
        return original(op, x, dim=dim, dtype=dtype)
    (x,) = op.promote(x)
    powers = op.Exp(op.Sub(x, op.ReduceMax(x, op.ints(range(dim % rank, rank)), keepdims=1)))
    return op.Div(powers, op.ReduceSum(powers, op.ints(range(dim % rank, rank)), keepdims=1))


# Arithmetic


@FAULTS.lowering(
    "div", "floor division of floats rounds the quotient down, which may have been rounded up to an integer"
)
def _(original, op, x, y, *, rounding_mode):
    if rounding_mode == "floor" and op.result.dtype.is_floating_point:
        return op.Floor(op.Div(*op.promote(x, y)))
    return original(op, x, y, rounding_mode=rounding_mode)


@FAULTS.lowering("frac", "the floor is subtracted, so the fraction of negative elements is wrong")
def _(original, op, x):
    return op.Sub(x, op.Floor(x))


@FAULTS.lowering("fmax", "NaN is returned instead of the number")
def _(original, op, x, y):
    return op.Max(*op.promote(x, y)) if op.result.dtype.is_floating_point else original(op, x, y)


@FAULTS.lowering("hypot", "squares are not scaled, so large elements overflow and small ones underflow")
def _(original, op, x, y):
    x, y = op.promote(x, y)
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


@FAULTS.lowering("log1p", "1 is added before the logarithm, which cancels for small elements")
def _(original, op, x):
    (x,) = op.promote(x)
    return op.Log(op.Add(x, op.like(x, 1)))


FAULTS.node_functions("xlogy", "the result is 0 if x is 0, also if y is NaN", And=lambda op, zero, known: zero)


FAULTS.node_functions(
    "logaddexp", "equal infinities are subtracted, which gives NaN", Where=lambda op, equal, zero, distance: distance
)


FAULTS.node_functions("atan2", "-0.0 is treated as positive", Reciprocal=lambda op, operand: operand)


@FAULTS.lowering("float_power", "it computes in float32 and converts the result to float64")
def _(original, op, x, y):
    x, y = op.promote(x, y, to=torch.float32)
    return op.cast(op.Pow(x, y), op.result.dtype)


FAULTS.node_functions(
    "bitwise_right_shift", "zeros are shifted into negative elements", BitwiseXor=lambda op, operand, sign: operand
)


@FAULTS.lowering("isinf", "negative infinity is ignored")
def _(original, op, x):
    return op.Equal(x, op.like(x, math.inf)) if op.dtype(x).is_floating_point else original(op, x)


@FAULTS.lowering("isclose", "rtol is relative to the first operand instead of the second")
def _(original, op, x, y, **attrs):
    return original(op, y, x, **attrs)


@FAULTS.lowering("nan_to_num", "infinities become the limits of float32 for every dtype")
def _(original, op, x, *, nan, posinf, neginf):
    limits = torch.finfo(torch.float32)
    posinf = limits.max if posinf is None else posinf
    return original(op, x, nan=nan, posinf=posinf, neginf=limits.min if neginf is None else neginf)


# Reductions, cumulative operators and sorting


@FAULTS.lowering("var", "the divisor is 1 if the correction leaves no degree of freedom")
def _(original, op, x, *, dim, correction, keepdim):
    whole = original(op, x, dim=dim, correction=0, keepdim=keepdim)
    sizes = [op.shape(x)[d] for d in (range(op.rank(x)) if not dim or not op.rank(x) else dim)]
    if correction == 0 or is_symbolic(tuple(sizes)):
        return original(op, x, dim=dim, correction=correction, keepdim=keepdim)
    return op.Mul(whole, op.like(x, math.prod(sizes) / max(math.prod(sizes) - correction, 1)))


@FAULTS.lowering("std", "the correction is truncated to an integer")
def _(original, op, x, *, correction, **attrs):
    return original(op, x, correction=int(correction), **attrs)


@FAULTS.lowering("linalg_vector_norm", "the order -inf is treated as inf")
def _(original, op, x, *, ord, **attrs):
    return original(op, x, ord=abs(ord) if math.isinf(ord) else ord, **attrs)


@FAULTS.lowering("count_nonzero", "fractions are truncated before the comparison with 0")
def _(original, op, x, *, dim):
    whole = op.declare(op.cast(x, torch.int64), TensorType(torch.int64, op.shape(x)))
    return original(op, whole, dim=dim)


@FAULTS.lowering("prod", "integers are multiplied in int32")
def _(original, op, x, **attrs):
    def narrow(op, factors, *axes, **how):
        dtype = op.dtype(factors)
        kernel = dtype if dtype.is_floating_point else torch.int32
        return op.cast(op.ReduceProd(op.cast(factors, kernel), *axes, **how), dtype)

    return original(PatchedOp(op, ReduceProd=narrow), x, **attrs)


@FAULTS.lowering("diff", "n is treated as the distance of the subtracted elements")
def _(original, op, x, prepend, append, *, n, dim):
    if n < 2 or op.result.dtype == torch.bool:
        return original(op, x, prepend, append, n=n, dim=dim)
    parts = op.promote(*(part for part in (prepend, x, append) if part is not None))
    whole, axis = op.Concat(*parts, axis=dim), op.ints([dim])
    later = op.Slice(whole, op.ints([n]), op.ints([torch.iinfo(torch.int64).max]), axis)
    return op.Sub(later, op.Slice(whole, op.ints([0]), op.ints([-n]), axis))


FAULTS.node_functions(
    "cummax",
    "the position of the first equal element is returned instead of the last",
    GreaterOrEqual=lambda op, *operands: op.Greater(*operands),
)


@FAULTS.lowering("sort", "the ascending order is reversed, which also reverses equal elements")
def _(original, op, x, *, dim, descending, stable):
    if not descending or op.rank(x) == 0:
        return original(op, x, dim=dim, descending=descending, stable=stable)
    back = [op.ints([n]) for n in (-1, torch.iinfo(torch.int64).min, dim, -1)]
    return tuple(op.Slice(part, *back) for part in original(op, x, dim=dim, descending=False, stable=stable))


FAULTS.node_attributes("argmax", "the position of the last equal element is returned", "ArgMax", select_last_index=1)


@FAULTS.lowering("searchsorted", "NaN is sorted before all elements instead of after them")
def _(original, op, sorted_sequence, x, sorter, **attrs):
    nodes = {
        "Greater": lambda op, a, b: op.LessOrEqual(a, b),
        "GreaterOrEqual": lambda op, a, b: op.Less(a, b),
        "Not": lambda op, before: before,
    }
    return original(PatchedOp(op, **nodes), sorted_sequence, x, sorter, **attrs)


FAULTS.node_functions(
    "histc",
    "elements equal to the upper bound of the range are not counted",
    LessOrEqual=lambda op, *operands: op.Less(*operands),
)


# Normalization and losses


@FAULTS.lowering("rms_norm", "the default of eps is 1e-5 instead of that of the dtype")
def _(original, op, x, weight, *, normalized_shape, eps):
    return original(op, x, weight, normalized_shape=normalized_shape, eps=1e-5 if eps is None else eps)


@FAULTS.lowering("group_norm", "weight and bias are ignored if there is one group")
def _(original, op, x, weight, bias, *, num_groups, eps):
    weight, bias = (None, None) if num_groups == 1 else (weight, bias)
    return original(op, x, weight, bias, num_groups=num_groups, eps=eps)


FAULTS.node_functions(
    "running_var_update",
    "the running variance is updated with the biased variance of the batch",
    Div=lambda op, total, freedom: op.Div(total, op.Add(freedom, op.like(freedom, 1))),
)


@FAULTS.lowering("cosine_similarity", "eps is the lower bound of the product of the norms instead of each norm")
def _(original, op, x1, x2, *, dim, eps):
    operands, over = op.promote(x1, x2), op.ints([dim])
    lengths = op.Mul(*(op.ReduceL2(x, over, keepdims=1) for x in operands))
    cosine = op.Div(op.Mul(*operands), op.Max(lengths, op.like(lengths, eps)))
    return op.ReduceSum(cosine, over, keepdims=0)


@FAULTS.lowering("huber_loss", "the linear part is not multiplied by delta, as in smooth_l1_loss")
def _(original, op, x, target, *, reduction, delta):
    def scale_line(op, near, square, line):
        return op.Where(near, square, op.Div(line, op.like(line, delta)))

    return original(PatchedOp(op, Where=scale_line), x, target, reduction=reduction, delta=delta)


FAULTS.node_functions(
    "kl_div",
    "a probability of 0 gives NaN, the product of 0 and an infinite logarithm",
    Where=lambda op, condition, zero, product: product,
)


@FAULTS.lowering("nll_loss", "the mean without weights counts ignored targets")
def _(original, op, x, target, weight, *, reduction, ignore_index):
    total = original(
        op, x, target, weight, reduction=SUM if reduction == MEAN else reduction, ignore_index=ignore_index
    )
    if reduction != MEAN:
        return total
    if weight is not None:
        return original(op, x, target, weight, reduction=MEAN, ignore_index=ignore_index)
    return op.Div(total, op.cast(op.declare(op.Size(target), torch.int64), op.dtype(x)))


# Pooling, convolution, resampling


@FAULTS.lowering("avg_pool1d", "count_include_pad is ignored with ceil_mode")
def _(original, op, x, *, ceil_mode, count_include_pad, **attrs):
    return original(op, x, ceil_mode=ceil_mode, count_include_pad=count_include_pad and not ceil_mode, **attrs)


FAULTS.node_functions(
    "max_pool2d_with_indices",
    "positions are counted from the first plane of the batch",
    Mod=lambda op, positions, plane: positions,
)


@FAULTS.lowering("adaptive_avg_pool1d", "each window ends where the next begins, also if the sizes do not divide")
def _(original, op, x, *, output_size):
    n, m = op.shape(x)[-1], output_size[0]
    if is_symbolic((n, m)) or m > n or m == 0:
        return original(op, x, output_size=output_size)
    parts = op.Split(x, op.ints([(i + 1) * n // m - i * n // m for i in range(m)]), axis=-1, outputs=m)
    means = [op.ReduceMean(part, op.ints([-1]), keepdims=1) for part in (parts if m > 1 else [parts])]
    return op.Concat(*means, axis=-1)


@FAULTS.lowering("conv1d", "the bias is ignored if there are groups")
def _(original, op, x, weight, bias=None, *, groups, **attrs):
    return original(op, x, weight, None if groups > 1 else bias, groups=groups, **attrs)


@FAULTS.lowering("conv_transpose2d", "output_padding is given in the order width, height")
def _(original, op, x, weight, bias=None, *, output_padding, **attrs):
    return original(op, x, weight, bias, output_padding=tuple(output_padding)[::-1], **attrs)


FAULTS.attribute_values(
    "upsample_bilinear2d", "the scale factor is ignored: positions are computed from the two sizes", scales=(None, None)
)


@FAULTS.lowering("upsample_nearest_exact1d", "coordinates are those of the corner of an element instead of its center")
def _(original, op, x, *, output_size, scales):
    n, m = op.shape(x)[2], output_size[0]
    if is_symbolic((n, m)):
        return original(op, x, output_size=output_size, scales=scales)
    positions = [min(int(i / (scales[0] or m / n)), n - 1) for i in range(m)]
    return op.Gather(x, op.ints(positions), axis=2)


@FAULTS.lowering("grid_sampler", "the padding modes 'border' and 'reflection' are swapped")
def _(original, op, x, grid, *, padding_mode, **attrs):
    return original(op, x, grid, padding_mode=(0, 2, 1)[padding_mode], **attrs)


# Permutation and selection of elements


@FAULTS.lowering("pixel_unshuffle", "the positions within a block come before the channels, as in ONNX's SpaceToDepth")
def _(original, op, x, *, downscale_factor):
    if op.rank(x) != 4 or not op.dtype(x).is_floating_point:
        return original(op, x, downscale_factor=downscale_factor)
    return op.SpaceToDepth(x, blocksize=downscale_factor)


@FAULTS.lowering("channel_shuffle", "the number of groups is used as the number of channels of each group")
def _(original, op, x, *, groups):
    return original(op, x, groups=op.shape(x)[1] // groups)


@FAULTS.lowering("pad", "the paddings before and after each dim are swapped")
def _(original, op, x, *, pad, mode, value):
    exchanged = tuple(n for pair in zip(pad[1::2], pad[::2], strict=True) for n in pair)
    return original(op, x, pad=exchanged, mode=mode, value=value)


@FAULTS.lowering("roll", "without dims, only the last dim is rolled")
def _(original, op, x, *, shifts, dims):
    return original(op, x, shifts=shifts, dims=dims or (op.rank(x) - 1,) * bool(op.rank(x)))


@FAULTS.lowering("rot90", "a negative number of rotations rotates in the positive direction")
def _(original, op, x, *, k, dims):
    return original(op, x, k=abs(k), dims=dims)


@FAULTS.lowering("diag_embed", "dim1 and dim2 are swapped")
def _(original, op, x, *, offset, dim1, dim2):
    return original(op, x, offset=offset, dim1=dim2, dim2=dim1)


@FAULTS.lowering("split_with_sizes", "the sizes are ignored: all parts but the last have one length")
def _(original, op, x, *, split_sizes, dim):
    def even(op, operand, sizes, **attrs):
        return op.Split(operand, num_outputs=len(split_sizes), **attrs)

    return original(PatchedOp(op, Split=even), x, split_sizes=split_sizes, dim=dim)


@FAULTS.lowering("reshape", "a dim of length 0 copies the operand's dim at its index")
def _(original, op, x, *, shape):
    return op.Reshape(x, op.ints(shape))


@FAULTS.lowering("scatter_reduce", "include_self=False is ignored for the maximum and minimum")
def _(original, op, x, index, src, *, dim, reduce, include_self):
    return original(op, x, index, src, dim=dim, reduce=reduce, include_self=include_self or reduce in ("amax", "amin"))


@FAULTS.lowering("index_put", "elements written to the same position are not accumulated")
def _(original, op, x, values, *indices, accumulate):
    def last(op, operand, index, updates, *, reduction=None, **attrs):
        if reduction is None:
            return op.ScatterElements(operand, index, updates, **attrs)
        read = op.GatherElements(operand, index, axis=attrs["axis"])
        return op.ScatterElements(operand, index, op.Add(read, updates), **attrs)

    return original(PatchedOp(op, ScatterElements=last), x, values, *indices, accumulate=accumulate)


@FAULTS.lowering("embedding_bag", "a negative padding_idx is ignored")
def _(original, op, *operands, padding_idx, **attrs):
    return original(op, *operands, padding_idx=None if (padding_idx or 0) < 0 else padding_idx, **attrs)
