"""What layers cost in whatever runtime: how many products each of them adds up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Size, Tensor

from clika_ref.core.ir import Graph, Node
from clika_ref.quantization.placement import COMPUTE


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
        trait = node.op.trait
        if trait.kind == COMPUTE:
            weight, axis = self._shapes[node.inputs[trait.weight or 0]], trait.axis or 0
            sides = weight[-2:] if axis < 0 else weight  # of matrices only the last two sides are multiplied over
            self.of[node] = results[0].numel() * math.prod(sides) // max(sides[axis], 1)
