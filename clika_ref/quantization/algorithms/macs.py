"""MACs: the cost of layers, whatever the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Size, Tensor

from clika_ref.core.ir import Graph, Node
from clika_ref.quantization.qdq.layer_weights import matrices_of
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT


def count_macs(node: Node, find_shape: Callable[[Any], Sequence[int]]) -> int:
    """Return the MACs of one call of a layer, given the shapes of its inputs and outputs."""
    trait = node.op.trait
    if "equation" in node.attrs:
        return _count_einsum_macs(node.attrs["equation"], [find_shape(v) for v in node.inputs], find_shape(node.output))
    if trait.matrices is not None:  # each input vector multiplies all weights, or one matrix of a stack
        met = slice(-2, None) if (trait.axis or 0) < 0 else slice(None)
        weights = sum(math.prod(find_shape(weight)[met]) for weight in matrices_of(node))
        return math.prod(find_shape(node.inputs[0])[:-1]) * weights
    weight, axis = find_shape(node.inputs[trait.weight or 0]), trait.axis or 0
    if axis > 0:  # a transposed layer multiplies each input element by all weights of its channel
        return math.prod(find_shape(node.inputs[0])) * math.prod(weight[1:])
    multiplied = weight[-2:] if axis < 0 else weight  # only the last two dims of matrices are multiplied over
    return math.prod(find_shape(node.output)) * math.prod(multiplied) // max(multiplied[axis], 1)


def _count_einsum_macs(equation: str, operands: Sequence[Sequence[int]], result: Sequence[int]) -> int:
    """Return the MACs of ``ij,jk->ik``: for each element of the result, one over each letter that it lacks."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    summed = {c for c in left if c.isalpha() and (c not in right if arrow else left.count(c) > 1)}
    lengths = dict.fromkeys(summed, 1)
    for term, shape in zip(left.split(","), operands, strict=True):
        before, _, after = term.partition("...")
        named = [*zip(before, shape, strict=False), *zip(reversed(after), reversed(shape), strict=False)]
        lengths |= {c: max(lengths[c], size) for c, size in named if c in summed}
    return math.prod(result) * math.prod(lengths.values()) if len(operands) > 1 else 0


class MacCounter:
    """Hook of `interpret` that counts MACs while a graph runs; operands have their actual sizes."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor]) -> None:
        self.of: dict[Node, int] = {}
        """MACs by layer."""
        self._shapes: dict[object, Size] = {}
        self.enter(graph, inputs)

    def enter(self, graph: Graph, inputs: Sequence[Tensor]) -> None:
        """Record the shapes of constants and inputs, of a graph or of a body that runs."""
        self._shapes |= {v: v.data.shape for v in graph.constants.values() if v.data is not None}
        self._shapes |= {v: x.shape for v, x in zip(graph.inputs, inputs, strict=True)}

    def __call__(self, node: Node, results: tuple[Tensor, ...]) -> None:
        """Record the shapes of a node's results."""
        self._shapes.update((v, x.shape) for v, x in zip(node.outputs, results, strict=True))
        if node.op.trait.kind == COMPUTE_TRAIT or node.op.trait.matrices is not None:
            self.of[node] = count_macs(node, self._shapes.__getitem__)
