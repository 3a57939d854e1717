"""Passes do the same in a body of control flow as in a graph."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Node
from clika_ref.core.passes import Phase, Pipeline
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()


def wrap_in_cond(graph):
    """Return a graph with one condition, whose branches are both the given graph."""
    outer = Graph("wrapped")
    condition = outer.add_input(TensorType(torch.bool, ()), "condition")
    inputs = [outer.add_input(value.type, value.name) for value in graph.inputs]
    outer.symbols = dict(graph.symbols)
    constants = {v: outer.add_constant(v.data, name, v.type) for name, v in graph.constants.items()}
    bodies = []
    for name in ("when_true", "when_false"):
        body = outer.new_body(name)
        mapping = constants | {value: body.add_input(value.type, value.name) for value in graph.inputs}
        for node in graph.nodes:
            body.insert_copy(node, mapping)
        for value in graph.outputs:
            body.add_output(mapping[value])
        bodies.append(body)
    types = [value.type for value in graph.outputs]
    node = outer.insert(Node(REGISTRY.operators["cond"], [condition, *inputs], {}, bodies=bodies), types)
    for value in node.outputs:
        outer.add_output(value)
    return outer


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = (t.reshape(2, 6, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / torch.full((), 2.0)).softmax(-1)
        return (scores @ v).transpose(1, 2).reshape(2, 6, 8) + x


def build_convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Identity())


NETS = {
    "convolutions": (build_convolutions, (2, 3, 6, 6)),
    "attention": (Attention, (2, 6, 8)),
}


@pytest.mark.parametrize("net", NETS)
def test_passes_same_nodes_in_bodies(net):
    """All passes together give a body the operators and attributes that they give the graph, and equal results."""
    build, shape = NETS[net]
    x = torch.randn(shape)
    plain = clika_compile(build().eval(), tracing_inputs=[x]).graph.clone()
    wrapped = wrap_in_cond(plain)
    verify(wrapped)
    for graph in (plain, wrapped):
        Pipeline.of(REGISTRY.passes, REGISTRY.operators, Phase.FUSE).run(graph)
    expected = [(node.op_type, repr(node.attrs)) for node in plain.nodes]
    (node,) = wrapped.nodes
    for body, chosen in zip(node.bodies, (True, False), strict=True):
        assert [(inner.op_type, repr(inner.attrs)) for inner in body.nodes] == expected
        found = interpret(wrapped, [torch.tensor(chosen), x])[0]
        torch.testing.assert_close(found, interpret(plain, [x])[0], rtol=0, atol=0)
