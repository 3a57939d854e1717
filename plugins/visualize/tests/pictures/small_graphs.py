"""Small graphs to draw, with simple operators in any module."""

import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import operator
from clika_ref.core.traits import compute_trait
from clika_ref.core.types import Origin, TensorType


@operator(quant=compute_trait(weight=1, axis=0, bias=2))
def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, stride: tuple = (1, 1)):
    """Stand in for ``x @ weight``; the result is not used."""
    return x


@operator()
def plus(x: torch.Tensor, other: torch.Tensor, *, alpha: float = 1.0):
    """``x + other``."""
    return x + other


@operator()
def split(x: torch.Tensor, *, parts: int = 2) -> tuple[torch.Tensor, ...]:
    """``x`` in parts."""
    return x.chunk(parts)


@operator()
def concat(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the tensors."""
    return torch.cat(tensors, dim)


TYPE = TensorType(torch.float32, (2, 8))


def append_node(graph: Graph, op, *operands, scope: str = "", count: int = 1, **attrs) -> Value:
    """Append a node in the module of a path such as ``a.b``; return its first output."""
    parts = scope.split(".") if scope else []
    scopes = tuple(".".join(parts[: depth + 1]) for depth in range(len(parts)))
    attrs = {**op.attributes, **attrs}
    return graph.insert(Node(op, operands, attrs, Origin(scopes)), [TYPE] * count).outputs[0]


def build_residual_graph(blocks: int = 2) -> Graph:
    """Return a network of residual blocks with two layers each."""
    graph = Graph("Residual")
    x = append_node(graph, layer, graph.add_input(TYPE, "x"), add_weight(graph, "stem"), scope="stem")
    for block in range(blocks):
        first = append_node(graph, layer, x, add_weight(graph, f"body.{block}.first"), scope=f"body.{block}.first")
        second = append_node(
            graph, layer, first, add_weight(graph, f"body.{block}.second"), scope=f"body.{block}.second"
        )
        x = append_node(graph, plus, second, x, scope=f"body.{block}")
    graph.add_output(append_node(graph, layer, x, add_weight(graph, "head"), scope="head"))
    return graph


def add_weight(graph: Graph, scope: str) -> Value:
    """Add the weight of a layer to a graph."""
    return graph.add_constant(torch.zeros(4, 8), f"{scope}.weight")


def build_branched_graph(count: int) -> Graph:
    """Return a graph with many branches on one input, concatenated at the end."""
    graph = Graph("Branches")
    x = graph.add_input(TYPE, "x")
    ends = []
    for branch in range(count):
        value = x
        for step in range(branch + 1):
            value = append_node(graph, plus, value, x, scope=f"branch{branch}.{step}")
        ends.append(value)
    graph.add_output(append_node(graph, concat, *ends))
    return graph
