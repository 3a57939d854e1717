"""What layers cost in whatever runtime: how many products each of them adds up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Size, Tensor

from clika_ref.core.ir import Graph, Node
from clika_ref.quantization.placement import COMPUTE


def products_of(node: Node, sides: Callable[[Any], Sequence[int]]) -> int:
    """Return how many products a layer adds up in a call, given the sides of what it reads and returns."""
    trait = node.op.trait
    weight, axis = sides(node.inputs[trait.weight or 0]), trait.axis or 0
    if axis > 0:  # a transposed layer multiplies each element that it reads by all that its channel has
        return math.prod(sides(node.inputs[0])) * math.prod(weight[1:])
    multiplied = weight[-2:] if axis < 0 else weight  # of matrices only the last two sides are multiplied over
    return math.prod(sides(node.output)) * math.prod(multiplied) // max(multiplied[axis], 1)


class ProductCounter:
    """Counts while a graph is run, as a hook of `interpret`: operands are as large as they are on the inputs."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor]) -> None:
        self.of: dict[Node, int] = {}
        """By layer."""
        self._shapes: dict[object, Size] = {v: v.data.shape for v in graph.constants.values() if v.data is not None}
        self._shapes |= {v: x.shape for v, x in zip(graph.inputs, inputs, strict=True)}

    def __call__(self, node: Node, results: tuple[Tensor, ...]) -> None:
        """Look at what a node has returned."""
        self._shapes.update((v, x.shape) for v, x in zip(node.outputs, results, strict=True))
        if node.op.trait.kind == COMPUTE:
            self.of[node] = products_of(node, self._shapes.__getitem__)
