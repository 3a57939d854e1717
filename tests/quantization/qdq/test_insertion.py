"""A quantized graph: its results, its float layers, and the tensors that each node reads."""

import pytest
import torch
from seeded_tensors import randn
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.core.registry import load_registry
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.qdq.qparams import QParams

OPERATORS = load_registry().operators

SCHEME = QuantizationScheme(QuantizedType(), QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))
WITH_BIAS = QuantizationScheme(
    SCHEME.activations, SCHEME.weights, int32_bias=frozenset({"linear"}), int32_bias_2d_or_static=frozenset({"linear"})
)


def trace_graph(module, *inputs):
    torch.manual_seed(0)
    return clika_compile(module, tracing_inputs=inputs).graph.clone()


def fake_quantize(x, scale, zero=0.0, low=0, high=255):
    return ((x / scale).round().add(zero).clamp(low, high) - zero) * scale


@pytest.mark.parametrize(
    ("scheme", "rank", "is_dynamic", "is_integer"),
    [
        (SCHEME, 2, False, False),
        (WITH_BIAS, 2, True, True),
        (WITH_BIAS, 3, False, True),
        (WITH_BIAS, 3, True, False),
    ],
)
def test_quantize_graph_layers_compute_on_quantized_values(scheme, rank, is_dynamic, is_integer):
    """Layers compute on quantized inputs, weights and, where the target supports it, biases."""
    torch.manual_seed(0)
    module, x = nn.Linear(4, 3), torch.randn(5, 4)[(None,) * (rank - 2)]
    graph = trace_graph(module, x, *[x.repeat_interleave(2, -2)] * is_dynamic)
    (node,) = graph.nodes
    scales = torch.tensor([0.01, 0.02, 0.004])
    plan = Plan(scheme, {graph.inputs[0].name: QParams(0.02, 128)}, {node.name: scales})
    quantize_graph(graph, plan, OPERATORS)
    (found,), _ = interpret(graph, [x])
    weight = fake_quantize(module.weight, scales[:, None], low=-127, high=127)
    bias = fake_quantize(module.bias, 0.02 * scales, low=-(2**31), high=2**31) if is_integer else module.bias
    torch.testing.assert_close(found, nn.functional.linear(fake_quantize(x, 0.02, 128), weight, bias))
    stored = [v.data.dtype for name, v in graph.constants.items() if name.endswith("_integers")]
    assert stored == ([torch.int8, torch.int32] if is_integer else [torch.int8])


class Shared(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        return y, y + x


def test_quantize_graph_all_readers_use_quantized_value():
    """All readers of an activation, also outputs, use its quantized value."""
    x = randn(5, 4)
    graph = trace_graph(Shared(), x)
    relu = next(node for node in graph.nodes if node.op_type == "relu")
    quantize_graph(graph, Plan(SCHEME, {relu.name: QParams(0.05, 0)}), OPERATORS)
    (first, second), _ = interpret(graph, [x])
    assert torch.equal(first, fake_quantize(x.relu(), 0.05))
    assert torch.equal(second, first + x)
    assert [node.op_type for node in graph.nodes] == ["relu", "quantize", "dequantize", "add"]


def test_quantize_graph_empty_plan_keeps_graph():
    """An empty plan keeps the graph."""
    graph = trace_graph(Shared(), torch.ones(2, 2))
    before = str(graph)
    quantize_graph(graph, Plan(SCHEME), OPERATORS)
    assert str(graph) == before
