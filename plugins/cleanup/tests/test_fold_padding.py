"""Padding is folded into the layer after it, and only where the results stay equal."""

import math

import pytest
import sympy
import torch
from clika_ref_aten.plugin import clika_ref_operators
from clika_ref_cleanup import fold_padding
from clika_ref_cleanup.fold_padding import FoldPadding

from clika_ref.core.rewriter import MatchStats, apply_rules
from clika_ref.core.symbols import evaluate, make_symbol

OPERATORS = {op.name: op for op in clika_ref_operators()}

POOLING = {"kernel_size": (3, 3), "stride": (2, 2)}


def make_weight(sketch, dims, kernel=3):
    generator = torch.Generator().manual_seed(0)
    return sketch.constant(torch.randn(5, 4, *[kernel] * dims, generator=generator), "conv.weight")


def pad_then_convolve(sketch, pad, *, dims=2, kernel=3, value=None, mode="constant", **attrs):
    x = sketch("tanh", sketch.input(2, 4, *(8, 9, 7)[:dims]))
    padded = sketch("pad", x, pad=pad, mode=mode, value=value)
    return sketch(f"conv{dims}d", padded, make_weight(sketch, dims, kernel), **attrs)


def find_reason(sketch, value, rule):
    """Return the reason of a rule not to fire on a graph with one result."""
    stats = MatchStats()
    assert apply_rules(sketch.returns(value).graph, [rule], OPERATORS, stats) == 0
    ((skip, _),) = stats.closest.values()
    return skip.reason


@pytest.mark.parametrize(
    ("dims", "pad", "attrs", "total"),
    [
        (1, (1, 2), {}, (1, 2)),
        (1, (1, 1), {"padding": (1,)}, (2,)),
        (2, (1, 1, 1, 1), {}, (1, 1)),
        (2, (0, 1, 0, 1), {"stride": (2, 2)}, (0, 0, 1, 1)),
        (2, (0, 1), {"padding": (1, 1)}, (1, 1, 1, 2)),
        (2, (1, 2, 3, 4), {"padding": (1, 0), "dilation": (2, 1)}, (4, 1, 5, 2)),
        (2, (1, 0, 1, 0), {"padding": "same"}, (2, 2, 1, 1)),
        (2, (1, 0, 1, 0), {"padding": "valid"}, (1, 1, 0, 0)),
        (2, (0, 0, 0, 0, 0, 0, 0, 0), {}, (0, 0)),
        (3, (1, 0, 0, 1, 1, 1), {"padding": (1,)}, (2, 1, 2, 2, 2, 1)),
    ],
    ids=str,
)
def test_fold_padding_convolution_sums_paddings(sketch, dims, pad, attrs, total):
    """Padding with 0 is added to that of a convolution, with begins and ends where they differ."""
    layer = pad_then_convolve(sketch, pad, dims=dims, **attrs)
    name = layer.name
    sketch.returns(sketch("relu", layer))
    assert sketch.clean(FoldPadding()) == ["tanh", f"conv{dims}d", "relu"]
    (node,) = [node for node in sketch.graph.nodes if node.op_type == f"conv{dims}d"]
    assert (node.attrs["padding"], node.name) == (total, name)


@pytest.mark.parametrize(
    ("pad", "changes", "reason"),
    [
        ((1, 1, 1, 1), {"value": 0.5}, "pads with 0.5; a convolution pads with 0"),
        ((1, 1, 1, 1), {"mode": "reflect"}, "has the mode 'reflect'"),
        ((1, 1, 1, 1), {"mode": "replicate"}, "has the mode 'replicate'"),
        ((1, 1, 1, -1), {}, "is negative, which crops"),
        ((1, 1, 1, 1, 0, 0, 1, 0), {}, "the batch or channel dim is padded"),
    ],
    ids=str,
)
def test_fold_padding_other_paddings_stay(sketch, pad, changes, reason):
    """Padding with another value or mode, of other dims or below 0 stays before a convolution, with the reason."""
    layer = pad_then_convolve(sketch, pad, **changes)
    assert reason in find_reason(sketch, layer, fold_padding.fold_padding_into_convolution)


def test_fold_padding_padded_channels_stay(sketch):
    """Padding of the channels stays."""
    x = sketch("pad", sketch.input(2, 3, 8, 9), pad=(0, 0, 0, 0, 0, 1))
    layer = sketch("conv2d", x, make_weight(sketch, 2))
    assert "channel dim" in find_reason(sketch, layer, fold_padding.fold_padding_into_convolution)


def test_fold_padding_transposed_convolution_keeps_padding(sketch):
    """A transposed convolution crops by its padding, so padding before it stays."""
    padded = sketch("pad", sketch.input(2, 4, 8, 9), pad=(1, 1, 1, 1))
    weight = sketch.constant(torch.randn(4, 5, 3, 3), "conv.weight")
    sketch.returns(sketch("conv_transpose2d", padded, weight))
    assert sketch.clean(FoldPadding()) == ["pad", "conv_transpose2d"]


def test_fold_padding_several_readers_each_folds(sketch):
    """Each convolution folds a shared padding; another reader keeps it."""
    padded = sketch("pad", sketch.input(2, 4, 8, 9), pad=(1, 1, 1, 1))
    weight = make_weight(sketch, 2)
    sketch.returns(sketch("conv2d", padded, weight), sketch("conv2d", padded, weight, stride=(2, 2)))
    sketch.returns(sketch("relu", padded))
    assert sketch.clean(FoldPadding()) == ["pad", "conv2d", "conv2d", "relu"]
    assert all(node.inputs[0] is sketch.graph.inputs[0] for node in sketch.graph.nodes if node.op_type == "conv2d")


@pytest.mark.parametrize("kind", ["relu", "clamp"])
@pytest.mark.parametrize("value", [0, -math.inf])
def test_fold_padding_max_pool_folds_neutral_padding(sketch, kind, value):
    """A maximum folds padding with -inf, and with 0 next to elements that are not negative."""
    x = sketch(kind, sketch.input(2, 4, 8, 9), *([0.0, 6.0] if kind == "clamp" else []))
    padded = sketch("pad", x, pad=(0, 1, 1, 1), value=value)
    sketch.returns(sketch("max_pool2d", padded, **POOLING))
    assert sketch.clean(FoldPadding()) == [kind, "max_pool2d"]


@pytest.mark.parametrize(
    ("kind", "value", "changes"),
    [
        ("tanh", 0, {}),
        ("relu", 1.5, {}),
        ("relu", 0, {"dilation": (2, 2)}),
        ("relu", -math.inf, {"ceil_mode": True}),
        ("relu", -math.inf, {"kernel_size": (2, 2), "padding": (1, 1)}),
    ],
)
def test_fold_padding_max_pool_other_padding_stays(sketch, kind, value, changes):
    """Padding that a maximum could include stays, as do windows that lie within the padding."""
    padded = sketch("pad", sketch(kind, sketch.input(2, 4, 8, 9)), pad=(1, 1, 1, 1), value=value)
    sketch.returns(sketch("max_pool2d", padded, **{**POOLING, **changes}))
    assert sketch.clean(FoldPadding()) == [kind, "pad", "max_pool2d"]


@pytest.mark.parametrize(
    ("changes", "is_folded"),
    [
        ({}, True),
        ({"count_include_pad": False}, True),
        ({"padding": (1, 1)}, True),
        ({"divisor_override": 5}, True),
        ({"padding": (1, 1), "count_include_pad": False}, False),
        ({"ceil_mode": True}, False),
    ],
    ids=str,
)
def test_fold_padding_avg_pool_counts_padding(sketch, changes, is_folded):
    """A mean folds padding with 0 and counts it, unless it excludes padding of its own."""
    padded = sketch("pad", sketch("tanh", sketch.input(2, 4, 8, 9)), pad=(0, 1, 0, 1))
    sketch.returns(sketch("avg_pool2d", padded, **{**POOLING, **changes}))
    assert sketch.clean(FoldPadding()) == (["tanh", "avg_pool2d"] if is_folded else ["tanh", "pad", "avg_pool2d"])
    if is_folded:
        *_, node = sketch.graph.nodes
        assert node.attrs["count_include_pad"] is True


def make_same_padding(n, kernel, stride):
    """Return TensorFlow's "same" padding of a dynamic dim, as PyTorch traces ``math.ceil(n / stride)``."""
    total = sympy.Max(((n + stride - 1) // stride - 1) * stride + kernel - n, 0)
    return total // 2, total - total // 2


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_fold_padding_by_sizes_becomes_same_upper(sketch, kernel, stride):
    """Padding by TensorFlow's "same" formula becomes same_upper; with a stride of 1, it does not depend on sizes."""
    x = sketch.input(2, 4, "h", 9)
    h = make_symbol("h")
    pad = (*make_same_padding(9, kernel, stride), *make_same_padding(h, kernel, stride))
    padded = sketch("pad", x, pad=tuple(int(n) if n.is_Integer else n for n in map(sympy.sympify, pad)))
    sketch.returns(sketch("conv2d", padded, make_weight(sketch, 2, kernel), stride=(stride, stride)))
    before = sketch.graph.outputs[0].type
    for height in (7, 8, 9):
        assert sketch.clean(FoldPadding(), sizes={"h": height}) == ["conv2d"]
        (node,) = sketch.graph.nodes
        assert node.attrs["padding"] == ("same_upper" if stride > 1 else (kernel // 2, kernel // 2))
        assert evaluate(before.shape[2], {"h": height}) == math.ceil(height / stride)


@pytest.mark.parametrize("changes", [{"dilation": (2, 2)}, {"padding": (1, 1)}, {"stride": (1, 1)}], ids=str)
def test_fold_padding_by_other_sizes_stays(sketch, changes):
    """Padding by sizes stays if the layer's windows do not match TensorFlow's "same" formula."""
    h = make_symbol("h")
    x = sketch.input(2, 4, "h", 8)
    padded = sketch("pad", x, pad=(0, 1, *make_same_padding(h, 3, 2)))
    sketch.returns(sketch("conv2d", padded, make_weight(sketch, 2), **{"stride": (2, 2), **changes}))
    assert sketch.clean(FoldPadding(), sizes={"h": 9}) == ["pad", "conv2d"]
