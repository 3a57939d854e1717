"""The shared parts of ONNX targets: equal calls are checked once."""

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType
from clika_ref.onnx_export import artifact
from clika_ref.onnx_export.artifact import cache_per_call


def test_cache_per_call_equal_calls_asks_once(monkeypatch):
    graph, operators = Graph("calls"), load_registry().operators
    build = Builder(graph, operators)
    wide, narrow = (graph.add_input(TensorType(torch.float32, (side, 3)), "x") for side in (4, 2))
    nodes = [
        build("leaky_relu", x, negative_slope=slope).producer
        for x, slope in ((wide, 0.5), (wide, 0.5), (wide, 0.25), (narrow, 0.5))
    ]
    seen = []
    asked = cache_per_call(lambda node: seen.append(node) or node.name)
    assert [asked(node) for node in nodes] == [nodes[0].name, nodes[0].name, nodes[2].name, nodes[3].name]
    assert seen == [nodes[0], *nodes[2:]]
    monkeypatch.setattr(artifact, "MAX_CACHED_CALLS", 3)
    assert asked(build("relu", wide).producer) == seen[-1].name  # which forgets all others
    asked(nodes[0])
    assert seen[-1] is nodes[0]
