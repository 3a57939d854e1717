"""Graphs for evaluation: a quantize/dequantize pair is one operator with equal results."""

import pytest
import torch
from small_schemes import OPERATORS, make_scheme
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.qdq.fused_pairs import clone_quantized, quantize_dequantize
from clika_ref.quantization.qdq.insertion import Plan, quantize_attributes, quantize_graph
from clika_ref.quantization.qdq.qparams import QParams


@pytest.mark.parametrize("kind", [QuantizedType(), QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True)])
@pytest.mark.parametrize("zero_point", [0, 77])
def test_quantize_dequantize_equals_pair(kind, zero_point):
    """Results are equal bit by bit, also for ties, clipped and infinite elements."""
    x = torch.cat((torch.randn(10_000) * 3, torch.arange(-300, 300) * 0.025, torch.tensor([1e30, -1e30])))
    integers = OPERATORS["quantize"](x, 0.05, zero_point, **quantize_attributes(kind))
    pair = OPERATORS["dequantize"](integers, 0.05, zero_point)
    assert torch.equal(quantize_dequantize(x, 0.05, zero_point, low=kind.low, high=kind.high), pair)


def test_clone_quantized_runs_as_quantized_graph():
    """The clone has no pair of an activation, returns the same results, and leaves the graph as it is."""
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    graph = clika_compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), tracing_inputs=[x]).graph
    plan = Plan(make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True)))
    plan.activations = {graph.inputs[0].name: QParams(0.02, 128), next(graph.nodes).output.name: QParams(0.01, 100)}
    whole, before = graph.clone(), str(graph)
    quantize_graph(whole, plan, OPERATORS)
    twin = clone_quantized(graph, plan, OPERATORS)
    assert [node.op_type for node in twin.nodes].count("quantize_dequantize") == 2
    assert not {"quantize", "dequantize"} & {node.op_type for node in twin.nodes}
    assert torch.equal(interpret(twin, [x])[0][0], interpret(whole, [x])[0][0])
    assert str(graph) == before
