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
def joined(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the tensors."""
    return torch.cat(tensors, dim)


TYPE = TensorType(torch.float32, (2, 8))


def put(graph: Graph, op, *operands, scope: str = "", count: int = 1, **attrs) -> Value:
    """Append a node in the module of a path such as ``a.b``; return its first output."""
    parts = scope.split(".") if scope else []
    scopes = tuple(".".join(parts[: depth + 1]) for depth in range(len(parts)))
    attrs = {**op.attributes, **attrs}
    return graph.insert(Node(op, operands, attrs, Origin(scopes)), [TYPE] * count).outputs[0]


def residual(blocks: int = 2) -> Graph:
    """Return a network of residual blocks with two layers each."""
    graph = Graph("Residual")
    x = put(graph, layer, graph.add_input(TYPE, "x"), weight_in(graph, "stem"), scope="stem")
    for block in range(blocks):
        first = put(graph, layer, x, weight_in(graph, f"body.{block}.first"), scope=f"body.{block}.first")
        second = put(graph, layer, first, weight_in(graph, f"body.{block}.second"), scope=f"body.{block}.second")
        x = put(graph, plus, second, x, scope=f"body.{block}")
    graph.add_output(put(graph, layer, x, weight_in(graph, "head"), scope="head"))
    return graph


def weight_in(graph: Graph, scope: str) -> Value:
    """Add the weight of a layer to a graph."""
    return graph.add_constant(torch.zeros(4, 8), f"{scope}.weight")


def branches(count: int) -> Graph:
    """A graph whose input a number of branches read, which are joined at the end."""
    graph = Graph("Branches")
    x = graph.add_input(TYPE, "x")
    ends = []
    for branch in range(count):
        value = x
        for step in range(branch + 1):
            value = put(graph, plus, value, x, scope=f"branch{branch}.{step}")
        ends.append(value)
    graph.add_output(put(graph, joined, *ends))
    return graph
