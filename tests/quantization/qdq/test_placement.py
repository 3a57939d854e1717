"""Placement: quantized activations, the scale that each has, and the reason for a float layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clika_ref import clika_compile
from clika_ref.core.quantization_scheme import FusedSums, QuantizationScheme, QuantizedType
from clika_ref.quantization.qdq.placement import choose_placement

SCHEME = QuantizationScheme(
    QuantizedType(),
    QuantizedType(is_signed=True, is_symmetric=True),
    layers=frozenset({"conv2d", "linear", "matmul"}),
    needs_quantized_output=frozenset({"conv2d"}),
    fused={"relu": {}},
    elementwise=frozenset({"add", "mul", "cat"}),
    data_movement=frozenset({"max_pool2d", "reshape", "permute", "flatten"}),
)


def choose_quantized_values(module, *inputs, has_range=lambda _: True, skipped=None, scheme=SCHEME, **known):
    graph = clika_compile(module, tracing_inputs=[inputs]).graph
    named = {node.name: node for node in graph.nodes}
    skipped = {named[name]: why for name, why in (skipped or {}).items()}
    return graph, choose_placement(graph, scheme, has_range, skipped, **known)


def op_types_of(values):
    return sorted(v.producer.op_type if v.producer else "input" for v in values)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 1, 1)
        return self.head(F.relu(self.two(F.relu(self.one(x))) + x))


def test_choose_placement_conv_with_fused_relu_quantizes_output():
    """A convolution with its fused operators returns INT8, and data movement keeps its scale."""
    graph, found = choose_quantized_values(Residual(), torch.ones(1, 3, 8, 8))
    assert [tail.producer.op_type for tail in found.layers.values()] == ["relu", "relu", "conv2d", "conv2d"]
    assert op_types_of(found.scale_sources) == ["conv2d", "conv2d", "input", "max_pool2d", "relu", "relu", "relu"]
    (pool,) = [v for v in found.scale_sources if v.producer and v.producer.op_type == "max_pool2d"]
    assert found.scale_sources[pool].producer.op_type == "relu"
    assert [(node.op_type, tail) for node, tail in found.elementwise.items()] == [
        ("add", graph.outputs[0].producer.first_tensor)
    ]


class PooledJoin(nn.Module):
    """A concatenation of convolutions, pooled, then read by a convolution and a float operator."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        joined = F.max_pool2d(torch.cat([self.one(x), self.two(x)], 1), 2)
        return self.head(joined), torch.tanh(joined)


@pytest.mark.parametrize("is_head_quantized", [True, False])
def test_choose_placement_unread_elementwise_stays_float(is_head_quantized):
    """A concatenation is quantized if a quantized layer reads it, also after data movement, and otherwise not."""
    skipped = {} if is_head_quantized else {"conv2d_2": "kept"}
    _, found = choose_quantized_values(PooledJoin(), torch.ones(1, 3, 8, 8), skipped=skipped)
    assert [node.op_type for node in found.elementwise] == ["cat"] * is_head_quantized
    values = ["conv2d", "conv2d", "input"]
    assert op_types_of(found.scale_sources) == (
        sorted([*values, "cat", "conv2d", "max_pool2d"]) if is_head_quantized else values
    )


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_choose_placement_linear_returns_float():
    """A linear layer reads INT8 and returns float, so that a sum of it stays float."""
    _, found = choose_quantized_values(Feedforward(), torch.ones(2, 3, 4))
    assert op_types_of(found.scale_sources) == ["gelu", "layer_norm"]
    assert found.elementwise == {}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.other = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        x = self.conv(x).flatten(2).permute(0, 2, 1)
        return self.linear(x), self.other(y.reshape(-1, 4)), x @ x.transpose(1, 2)


def test_choose_placement_permuted_int8_stays_int8_for_layer():
    """Permuted INT8 activations stay INT8 where a layer reads them."""
    graph, found = choose_quantized_values(Heads(), torch.ones(1, 3, 8, 8), torch.ones(2, 2, 4))
    sources = {
        v.producer.op_type: s.producer.op_type for v, s in found.scale_sources.items() if v.producer and s.producer
    }
    assert sources["permute"] == "conv2d"
    assert found.scale_sources[graph.inputs[0]] is graph.inputs[0]
    (moved,) = [v for v, source in found.scale_sources.items() if source is graph.inputs[1]]
    assert moved.producer is not None  # of a float that is moved, the result only
    assert [*found.floats.values()] == ["both operands are computed"]


def test_choose_placement_missing_range_or_skip_has_reason():
    """A layer without a range, or a skipped one, stays in float with a reason."""
    _, found = choose_quantized_values(
        Feedforward(), torch.ones(2, 3, 4), has_range=lambda v: v.producer.op_type != "gelu"
    )
    assert op_types_of(found.scale_sources) == ["layer_norm"]
    assert [reason.startswith("its input has no range") for reason in found.floats.values()] == [True]
    graph, _ = choose_quantized_values(Residual(), torch.ones(1, 3, 8, 8))
    name = next(node.name for node in graph.nodes if node.op_type == "conv2d")
    _, found = choose_quantized_values(Residual(), torch.ones(1, 3, 8, 8), skipped={name: "the user skips it"})
    assert [*found.floats.values()] == ["the user skips it"]
    assert len(found.layers) == 3


OPEN = replace(SCHEME, needs_quantized_output=frozenset(), fused={}, elementwise=frozenset())
"""The scheme of a target whose layers return floats, which the next one makes integers of."""


def test_choose_placement_fused_sums_quantize_operands():
    """A target with fused sums gets quantized operands, and a quantized layer result if it needs one."""
    for of_two, expected in ((True, ["conv2d", "input", "max_pool2d", "relu", "relu"]), (False, None)):
        scheme = replace(OPEN, fused_sums=FusedSums(frozenset({"conv2d"}), rounds_layer_result=of_two))
        graph, found = choose_quantized_values(Residual(), torch.ones(1, 3, 8, 8), scheme=scheme)
        (added,) = [node for node in graph.nodes if node.op_type == "add"]
        rounded = [v.producer.op_type for v in added.inputs if v in found.scale_sources]
        assert rounded == (["conv2d", "max_pool2d"] if of_two else ["max_pool2d"])
        assert expected is None or op_types_of(found.scale_sources) == expected


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.two(x) + self.one(x) + x.mean((2, 3), keepdim=True)


def test_choose_placement_sum_of_two_layers_keeps_later_float():
    """Of two layers that are added, the later result stays in float."""
    scheme = replace(OPEN, fused_sums=FusedSums(frozenset({"conv2d"}), rounds_layer_result=False))
    graph, found = choose_quantized_values(Projected(), torch.ones(1, 3, 8, 8), scheme=scheme)
    two, one = (node for node in graph.nodes if node.op_type == "conv2d")
    assert two.output in found.scale_sources
    assert one.output not in found.scale_sources


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(9, 3, 1)

    def forward(self, x):
        y = torch.relu(self.one(x))
        pair = torch.cat([x, y], 1)
        return self.two(torch.cat([pair, y], 1)) + self.one(y)


def test_choose_placement_concat_operands_share_scale():
    """The operands of a concatenation share a scale if the target requires it."""
    graph, found = choose_quantized_values(
        Joined(), torch.ones(1, 3, 8, 8), scheme=replace(OPEN, shared_qparams=frozenset({"cat"}))
    )
    inner, outer = (node.output for node in graph.nodes if node.op_type == "cat")
    (relu,) = [node.output for node in graph.nodes if node.op_type == "relu"]
    assert [found.scale_sources[v] for v in (*graph.inputs, relu, inner, outer)] == [outer] * 4
    graph, found = choose_quantized_values(Joined(), torch.ones(1, 3, 8, 8), scheme=OPEN)
    assert [v.producer and v.producer.op_type for v in found.scale_sources.values()] == [None, "relu", "cat"]


class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.two(F.max_pool2d(torch.relu(self.one(x)), 2))


def test_choose_placement_quantizes_before_moves():
    """Data movement before a layer is done in INT8 if the target requires it."""
    _, found = choose_quantized_values(
        Permuted(), torch.ones(1, 3, 8, 8), scheme=replace(OPEN, quantizes_before_moves=True)
    )
    sources = {
        v.producer.op_type: s.producer.op_type for v, s in found.scale_sources.items() if v.producer and s.producer
    }
    assert sources == {"relu": "relu", "max_pool2d": "relu"}


class Transposed(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.layer = nn.ConvTranspose2d(4, 4, 2, groups=groups)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("groups", "is_negative", "reason"),
    [
        (1, False, None),
        (1, True, "the target runs conv_transpose2d in INT8 only if its inputs are not negative"),
        (2, False, "the target computes conv_transpose2d with groups in float"),
    ],
)
def test_choose_placement_conditional_layer_has_reason(groups, is_negative, reason):
    """A layer that the target supports under a condition stays in float without it."""
    kinds = frozenset({"conv_transpose2d"})
    scheme = replace(OPEN, layers=kinds, needs_zero_point_0=kinds, needs_single_group=kinds)
    known = {"is_negative": lambda _: is_negative}
    _, found = choose_quantized_values(Transposed(groups), torch.ones(1, 4, 8, 8), scheme=scheme, **known)
    assert [*found.floats.values()] == ([] if reason is None else [reason])
