"""Faults of pooling, resampling, padding and convolution."""

from __future__ import annotations

import clika_ref_aten.adaptive_pooling
import clika_ref_aten.pooling
import clika_ref_aten.resampling
import torch
from clika_ref_aten.spatial import ceil_divide, pad_zeros

from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp, override_attributes
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("pooling")


FAULTS.node_attributes(
    "avg_pool2d", "padding never counts, as if count_include_pad were False", "AveragePool", count_include_pad=None
)


@FAULTS.lowering("avg_pool2d", "with ceil_mode, elements of a window beyond the padding count, too")
def _(original, op, x, *, ceil_mode, **attrs):
    counted = override_attributes(op, "AveragePool", count_include_pad=1) if ceil_mode else op
    return original(counted, x, ceil_mode=ceil_mode, **attrs)


FAULTS.attribute_values("avg_pool2d", "divisor_override is ignored", divisor_override=None)


@FAULTS.lowering("avg_pool1d", "count_include_pad is the ONNX default, 0, if the first window has no padding")
def _(original, op, x, *, count_include_pad, padding, **attrs):
    return original(op, x, count_include_pad=count_include_pad and padding[0] > 1, padding=padding, **attrs)


@FAULTS.lowering("max_pool2d", "the padding is zeros, which are larger than negative elements")
def _(original, op, x, *, padding, **attrs):
    pads = tuple(padding) * (2 // len(padding))
    return original(op, pad_zeros(op, x, pads, pads), padding=(0, 0), **attrs)


FAULTS.node_functions(
    "max_pool2d_with_indices",
    "positions are counted in the whole tensor, as in ONNX",
    Mod=lambda op, position, plane: op.Identity(position),
)


@FAULTS.function(
    "max_pool2d",
    "with ceil_mode, a last window starts in the padding at the end",
    clika_ref_aten.pooling,
    "_window_count",
    "operators",
)
def _(original, n, k, s, p, d, *, ceil_mode):
    return (ceil_divide if ceil_mode else int.__floordiv__)(n + 2 * p - d * (k - 1) - 1, s) + 1


@FAULTS.lowering("adaptive_avg_pool2d", "a shorter window is averaged over the length of the others")
def _(original, op, x, **attrs):
    altered = PatchedOp(op, Div=lambda op, a, b: op.Div(a, op.ReduceMax(b, keepdims=0)))
    return original(altered, x, **attrs)


@FAULTS.function(
    "adaptive_max_pool2d",
    "the position of a maximum ignores the rows above it",
    clika_ref_aten.adaptive_pooling,
    "_extend_flat_indices",
    "operators",
)
def _(original, op, places, positions, n):
    return op.Add(op.Mul(op.Unsqueeze(places, op.ints([-2, -1])), op.scalar(0, torch.int64)), positions)


FAULTS.node_attributes(
    "upsample_nearest2d", "the nearest element is found by rounding up", "Resize", nearest_mode="ceil"
)


@FAULTS.function(
    "upsample_nearest2d",
    "coordinates are those of pixel centers",
    clika_ref_aten.resampling,
    "_source_indices",
    "operators",
)
def _(original, n, m, scale, **how):
    return original(n, m, scale, **{**how, "exact": True})


@FAULTS.lowering("upsample_nearest1d", "Resize scales by the quotient of the lengths, which is rounded")
def _(original, op, x, *, output_size, scales):
    factors = op.constant([1.0, 1.0, output_size[0] / op.shape(x)[2]], torch.float32)
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return op.Resize(x, None, factors, mode="nearest", **modes)


FAULTS.substitute(
    "upsample_nearest_exact2d",
    "coordinates of a small plane are rounded like those of a large one",
    clika_ref_aten.resampling,
    "_small_plane_cases",
    lambda sizes: (False,),
    levels=("operators",),
)


FAULTS.attribute_values("upsample_bilinear2d", "align_corners is ignored", align_corners=False)


@FAULTS.lowering("upsample_bilinear2d", "coordinates are computed from the rounded size, not from the scale factor")
def _(original, op, x, *, scales, **attrs):
    return original(op, x, scales=(None,) * len(scales), **attrs)


FAULTS.node_attributes(
    "upsample_bicubic2d", "the cubic coefficient is -0.5 instead of -0.75", "Resize", cubic_coeff_a=-0.5
)


FAULTS.attribute_values("grid_sampler", "padding_mode is always zeros", padding_mode=0)


@FAULTS.lowering("conv2d", "padding='same' puts the odd element first")
def _(original, op, x, weight, *bias, padding, **attrs):
    def write(op, *operands, pads, **how):
        return op.Conv(*operands, pads=[*pads[2:], *pads[:2]], **how)

    return original(PatchedOp(op, Conv=write) if padding == "same" else op, x, weight, *bias, padding=padding, **attrs)


@FAULTS.lowering("conv2d", "input channels are assigned to the groups in turn")
def _(original, op, x, weight, *bias, groups, **attrs):
    axis = op.rank(x) - 3
    order = torch.arange(op.shape(x)[axis]).reshape(-1, groups).T.reshape(-1)
    mixed = op.Gather(x, op.constant(order, torch.int64), axis=axis)
    op.declare(mixed, TensorType(op.dtype(x), op.shape(x)))
    return original(op, mixed, weight, *bias, groups=groups, **attrs)


@FAULTS.lowering("conv_transpose2d", "the kernel is not flipped")
def _(original, op, x, weight, *bias, **attrs):
    def write(op, x, weight, *bias, **how):
        ends, steps = op.ints([-(2**31)] * 2), op.ints([-1, -1])
        return op.ConvTranspose(x, op.Slice(weight, op.ints([-1, -1]), ends, op.ints([2, 3]), steps), *bias, **how)

    return original(PatchedOp(op, ConvTranspose=write), x, weight, *bias, **attrs)


FAULTS.node_functions(
    "pad",
    "the mode reflect repeats the edge",
    Pad=lambda op, *operands, mode: op.Pad(*operands, mode="edge" if mode == "reflect" else mode),
)


@FAULTS.lowering("pad", "pairs are applied from the first dim on")
def _(original, op, x, *, pad, **attrs):
    pairs = [pad[i : i + 2] for i in range(0, len(pad), 2)]
    return original(op, x, pad=tuple(n for pair in reversed(pairs) for n in pair), **attrs)
