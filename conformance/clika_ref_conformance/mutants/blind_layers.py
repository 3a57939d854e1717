"""Faulty lowerings of layers, losses and integer operators, by an author without knowledge of samples and tests."""

from __future__ import annotations

import torch

from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_conformance.mutants.patched_op import PatchedOp, override_attributes
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("blind-layers", blind=True)


# Recurrent networks and attention


FAULTS.node_attributes(
    "gru",
    "the reset gate is applied before the hidden state is multiplied, as ONNX does by default",
    "GRU",
    linear_before_reset=0,
)


@FAULTS.lowering("rnn_relu", "the backward direction keeps ONNX's default activation, tanh")
def _(original, op, *operands, bidirectional, **attrs):
    op = override_attributes(op, "RNN", activations=["Relu", "Tanh"]) if bidirectional else op
    return original(op, *operands, bidirectional=bidirectional, **attrs)


@FAULTS.lowering("lstm", "initial states are read in the order direction, then layer")
def _(original, op, *operands, num_layers, bidirectional, **attrs):
    def by_direction(op, state, *sizes, **how):
        if not sizes:
            return op.Split(state, **how)
        return tuple(op.Gather(state, op.ints([i, i + num_layers]), axis=0) for i in range(num_layers))

    op = PatchedOp(op, Split=by_direction) if bidirectional else op
    return original(op, *operands, num_layers=num_layers, bidirectional=bidirectional, **attrs)


@FAULTS.lowering("scaled_dot_product_attention", "heads share keys in turn instead of by groups of neighbors")
def _(original, op, x, key, value, attn_mask=None, *, enable_gqa, **attrs):
    heads, shared = (op.shape(x)[-3], op.shape(key)[-3]) if enable_gqa else (1, 1)
    if heads != shared and not is_symbolic((heads, shared)):
        key, value = (
            op.declare(
                op.Concat(*[v] * (heads // shared), axis=-3),
                TensorType(op.dtype(v), (*op.shape(v)[:-3], heads, *op.shape(v)[-2:])),
            )
            for v in (key, value)
        )
    return original(op, x, key, value, attn_mask, enable_gqa=enable_gqa, **attrs)


# Matrix products and quantization


@FAULTS.lowering("baddbmm", "with beta = 0 the first operand is multiplied by 0, which keeps its NaN and infinities")
def _(original, op, x, batch1, batch2, *, beta, alpha):
    if beta != 0 or not op.dtype(x).is_floating_point:
        return original(op, x, batch1, batch2, beta=beta, alpha=alpha)
    return op.Add(op.Mul(x, op.like(x, 0)), original(op, x, batch1, batch2, beta=0, alpha=alpha))


@FAULTS.lowering("quantize", "the zero point is added before rounding, so ties round by its parity")
def _(original, op, x, scale, zero_point, *, dtype, quant_min, quant_max, axis):
    if axis is not None:
        return original(op, x, scale, zero_point, dtype=dtype, quant_min=quant_min, quant_max=quant_max, axis=axis)
    x, scale, zero_point = op.promote(x, scale, zero_point, to=torch.float32)
    ends = (
        torch.iinfo(dtype).min if quant_min is None else quant_min,
        torch.iinfo(dtype).max if quant_max is None else quant_max,
    )
    steps = op.Round(op.Add(op.Div(x, scale), zero_point))
    return op.cast(op.Clip(steps, *(op.like(x, end) for end in ends)), dtype)


@FAULTS.lowering("dequantize", "int32 becomes float32 before the zero point is subtracted")
def _(original, op, x, scale, zero_point, *, dtype, axis, **few):
    if op.dtype(x) != torch.int32 or zero_point is None or axis is not None:
        return original(op, x, scale, zero_point, dtype=dtype, axis=axis, **few)
    steps, scale, zero_point = op.promote(x, scale, zero_point, to=torch.float32)
    return op.cast(op.Mul(op.Sub(steps, zero_point), scale), dtype)


# Normalization and losses


FAULTS.node_functions(
    "native_layer_norm",
    "the third result is the standard deviation instead of its reciprocal",
    Reciprocal=lambda op, deviation: deviation,
)


FAULTS.attribute_values("instance_norm", "eps is always ONNX's default, 1e-5", eps=1e-5)


FAULTS.node_functions(
    "binary_cross_entropy",
    "logarithms are not clamped to -100, so a certain error has an infinite loss",
    Max=lambda op, logarithm, lowest: logarithm,
)


FAULTS.node_functions(
    "poisson_nll_loss", "a target of exactly 1 gets the Stirling term", LessOrEqual=lambda op, *pair: op.Less(*pair)
)


@FAULTS.lowering("triplet_margin_loss", "swap is ignored unless p is 2")
def _(original, op, *operands, p, swap, **attrs):
    return original(op, *operands, p=p, swap=swap and p == 2, **attrs)


@FAULTS.lowering("cross_entropy_loss", "label smoothing is ignored if targets are probabilities")
def _(original, op, x, target, weight, *, label_smoothing, **attrs):
    label_smoothing = 0.0 if op.dtype(target).is_floating_point else label_smoothing
    return original(op, x, target, weight, label_smoothing=label_smoothing, **attrs)


# Windows and interpolation


@FAULTS.lowering("conv3d", "dilations are given in the order width, height, depth")
def _(original, op, *operands, dilation, **attrs):
    return original(op, *operands, dilation=tuple(dilation)[::-1], **attrs)


FAULTS.node_attributes(
    "upsample_bicubic2d", "the cubic coefficient is -0.5, that of other libraries", "Resize", cubic_coeff_a=-0.5
)


@FAULTS.lowering("im2col", "the positions within a window come before the channels")
def _(original, op, x, **attrs):
    b = op.rank(x) - 3
    return original(override_attributes(op, "Transpose", perm=[*range(b), b + 1, b + 3, b, b + 2, b + 4]), x, **attrs)


# Sorting, cumulative operators and indices


FAULTS.node_functions(
    "logcumsumexp", "equal infinities are subtracted, which gives NaN", Where=lambda op, equal, zero, distance: distance
)


@FAULTS.lowering("median", "the median of an even number of elements is the upper middle one")
def _(original, op, x, *, dim, keepdim):
    if op.rank(x) == 0 or is_symbolic(op.shape(x)[dim : dim + 1 or None]):
        return original(op, x, dim=dim, keepdim=keepdim)
    middle = op.ints([op.shape(x)[dim] // 2 + 1])
    return original(PatchedOp(op, TopK=lambda op, v, k, **how: op.TopK(v, middle, **how)), x, dim=dim, keepdim=keepdim)


FAULTS.node_functions(
    "repeat_interleave",
    "with a tensor of counts, each run but the last contains one copy of the next",
    GreaterOrEqual=lambda op, *pair: op.Greater(*pair),
)


@FAULTS.lowering("take", "negative indices are clamped to 0")
def _(original, op, x, index):
    return original(op, x, op.declare(op.Max(index, op.like(index, 0)), TensorType(op.dtype(index), op.shape(index))))


@FAULTS.lowering("linspace", "numbers of an integer dtype are rounded instead of truncated")
def _(original, op, *, start, end, steps, dtype, device):
    if is_symbolic((start, end, steps)) or op.result.dtype.is_floating_point:
        return original(op, start=start, end=end, steps=steps, dtype=dtype, device=device)
    return op.constant(torch.linspace(start, end, steps, dtype=torch.float64).round(), op.result.dtype)


@FAULTS.lowering("round", "with negative decimals, ties are rounded away from zero")
def _(original, op, x, *, decimals):
    if decimals >= 0 or not op.dtype(x).is_floating_point:
        return original(op, x, decimals=decimals)
    scale = op.like(x, 10.0**-decimals)
    away = op.Floor(op.Add(op.Abs(op.Div(x, scale)), op.like(x, 0.5)))
    return op.Mul(op.Mul(op.Sign(x), away), scale)


# Creation


FAULTS.attribute_values("logspace", "the base is ignored, and is always 10", base=10.0)


# Classification losses


@FAULTS.lowering("multi_margin_loss", "with p = 2, the weight of the class is squared, too")
def _(original, op, x, target, weight, *, p, **attrs):
    weight = op.Mul(weight, weight) if weight is not None and p == 2 else weight
    return original(op, x, target, weight, p=p, **attrs)


# Indices and distances


FAULTS.node_attributes(
    "pixel_shuffle",
    "the positions within a block come before the channels, as in ONNX's default mode, DCR",
    "DepthToSpace",
    mode="DCR",
)


FAULTS.node_functions(
    "repeat_interleave", "one count for all elements only applies to the first", Expand=lambda op, counts, shape: counts
)


FAULTS.node_functions(
    "scatter_reduce", "the mean of integers is rounded towards zero", Less=lambda op, rest, zero: op.Less(zero, zero)
)


FAULTS.node_functions(
    "cdist",
    "the eps of pairwise_distance is added to the differences",
    Sub=lambda op, a, b: op.Add(op.Sub(a, b), op.like(a, 1e-6)),
)


# More attention, sums, losses and weights


@FAULTS.lowering(
    "scaled_dot_product_attention",
    "the causal mask is aligned to the last key instead of the first if the numbers of keys and queries differ",
)
def _(original, op, x, key, value, attn_mask=None, *, is_causal, **attrs):
    queries, keys = op.shape(x)[-2], op.shape(key)[-2]
    if not is_causal or attn_mask is not None or is_symbolic((queries, keys)) or queries == keys:
        return original(op, x, key, value, attn_mask, is_causal=is_causal, **attrs)
    lower = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return original(op, x, key, value, op.constant(lower, torch.bool), is_causal=False, **attrs)


@FAULTS.lowering("cumsum", "floats are converted to the requested dtype after the sum instead of before")
def _(original, op, x, *, dim, dtype):
    if op.dtype(x) not in (torch.float32, torch.float64) or op.rank(x) == 0:
        return original(op, x, dim=dim, dtype=dtype)
    return op.cast(op.CumSum(x, op.constant(dim, torch.int64)), op.result.dtype)


@FAULTS.lowering("baddbmm", "with beta=0, the operand is multiplied by 0, so its NaN remains")
def _(original, op, x, batch1, batch2, *, beta, alpha):
    product = original(op, x, batch1, batch2, beta=beta, alpha=alpha)
    if beta != 0 or not op.result.dtype.is_floating_point:
        return product
    return op.Add(op.Mul(x, op.like(x, 0)), product)


@FAULTS.lowering("cross_entropy_loss", "label smoothing ignores the weights of the classes")
def _(original, op, x, target, weight, *, label_smoothing, **attrs):
    if weight is None or not label_smoothing:
        return original(op, x, target, weight, label_smoothing=label_smoothing, **attrs)
    plain = original(op, x, target, weight, label_smoothing=0.0, **attrs)
    smooth = original(op, x, target, None, label_smoothing=1.0, **attrs)
    return op.Add(op.Mul(plain, op.like(x, 1 - label_smoothing)), op.Mul(smooth, op.like(x, label_smoothing)))


@FAULTS.lowering("weight_norm", "every negative dim is treated as -1, the norm over all dims")
def _(original, op, v, g, *, dim):
    return original(op, v, g, dim=max(dim, -1))


@FAULTS.lowering("gru", "the initial state is read as [directions, layers] instead of [layers, directions]")
def _(original, op, x, state, *params, num_layers, bidirectional, **attrs):
    if bidirectional and num_layers > 1:
        order = [d * num_layers + layer for layer in range(num_layers) for d in range(2)]
        known = TensorType(op.dtype(state), op.shape(state))
        state = op.declare(op.Gather(state, op.ints(order), axis=0), known)
    return original(op, x, state, *params, num_layers=num_layers, bidirectional=bidirectional, **attrs)


# Embeddings, recurrent cells, matrix products and remainders


@FAULTS.lowering("embedding", "the row at padding_idx is read as zeros, although only its gradient must be zero")
def _(original, op, weight, indices, *, padding_idx, **attrs):
    found = original(op, weight, indices, padding_idx=padding_idx, **attrs)
    if padding_idx is None or is_symbolic(padding_idx) or padding_idx < 0:
        return found
    padded = op.Unsqueeze(op.Equal(indices, op.like(indices, padding_idx)), op.ints([-1]))
    return op.Where(padded, op.like(weight, 0), found)


@FAULTS.lowering("gru_cell", "the hidden bias of the new gate is added after the product with the reset gate")
def _(original, op, x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    if b_ih is None or b_hh is None or is_symbolic(op.shape(b_hh)):
        return original(op, x, h, w_ih, w_hh, b_ih, b_hh)
    known = TensorType(op.dtype(b_hh), op.shape(b_hh))
    new = torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(op.shape(b_hh)[0] // 3)
    b_ih = op.declare(op.Add(b_ih, op.Mul(b_hh, op.constant(new, op.dtype(b_hh)))), known)
    b_hh = op.declare(op.Mul(b_hh, op.constant(1 - new, op.dtype(b_hh))), known)
    return original(op, x, h, w_ih, w_hh, b_ih, b_hh)


@FAULTS.lowering("linalg_cross", "dim is ignored if the last dim has 3 elements")
def _(original, op, x, other, *, dim):
    last = (op.shape(x)[-1], op.shape(other)[-1])
    return original(op, x, other, dim=-1 if not is_symbolic(last) and last == (3, 3) else dim)


@FAULTS.lowering("binary_cross_entropy_with_logits", "weight is ignored if pos_weight is given, too")
def _(original, op, x, target, weight, pos_weight, *, reduction):
    return original(op, x, target, weight if pos_weight is None else None, pos_weight, reduction=reduction)


@FAULTS.lowering("remainder", "the remainder of floats is positive also for a negative divisor")
def _(original, op, x, y):
    if not op.result.dtype.is_floating_point:
        return original(op, x, y)
    x, y = op.promote(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(op.Less(rest, op.like(rest, 0)), op.Add(rest, op.Abs(y)), rest)
