"""Compare a runtime that orders almost equal elements differently from eager, such as the scores of a top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clika_ref.compiled.runners import run_with_outputs
from clika_ref.core.comparison import describe_differences
from clika_ref.core.ir import Graph, Node
from clika_ref.core.targets import Target
from clika_ref.quantization.graph_runs import compute_outputs

ORDERING_OPERATORS = frozenset({"topk", "sort", "argsort"})
"""Operators that order the elements of their operand along ``dim``; the last result are the indices, each once."""


def agrees_in_own_order(
    target: Target, graph: Graph, inputs: Sequence[Tensor], found: Sequence[Tensor], roundings: float
) -> bool:
    """Whether a runtime's results agree with the graph, if the graph orders almost equal elements as the runtime does.

    The order is read from a second file, whose outputs include the indices.

    Args:
        target: the target that ran the file.
        graph: the graph that it was compiled from.
        inputs: one tensor for each input of the graph.
        found: the results of the file, one tensor for each output.
        roundings: the tolerance, for results and for elements whose order may change, as in `describe_differences`.

    Returns:
        False also if nothing is ordered, or if the runtime orders elements that differ.
    """
    ordering = [node for node in graph.nodes if node.op.name in ORDERING_OPERATORS]
    if not ordering:
        return False
    probe = graph.clone()
    indices = [node.outputs[-1] for node in probe.nodes if node.op.name in ORDERING_OPERATORS]
    results = run_with_outputs(probe, indices, target, inputs)
    orders = dict(zip(ordering, (results[value] for value in indices), strict=True))
    replay = _OrderReplay(graph, inputs, orders, roundings)
    return not describe_differences(compute_outputs(graph, inputs, replay), found, roundings)


class _OrderReplay:
    """A hook of a graph run that replaces the order of each ordering node by that of the runtime, where it may be."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], orders: Mapping[Node, Tensor], roundings: float) -> None:
        self._orders, self._roundings = orders, roundings
        self._ordered = {node.inputs[0] for node in orders}
        self._data: dict[object, Tensor | None] = {v: v.data for v in graph.constants.values() if v in self._ordered}
        self._data.update(zip(graph.inputs, inputs, strict=True))

    def __call__(self, node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results of a node, in the order of the runtime if it is an ordering node."""
        if node in self._orders:
            results = self._reorder(node, results)
        self._data.update((v, result) for v, result in zip(node.outputs, results, strict=True) if v in self._ordered)
        return results

    def _reorder(self, node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, own, usual = self._data[node.inputs[0]], self._orders[node], results[-1]
        dim = node.attrs["dim"]
        if x is None or torch.equal(own, usual) or not _is_choice_of_distinct(own, x, dim):
            return results
        pair = [x.gather(dim, usual), x.gather(dim, own)]
        in_order = pair if node.attrs.get("sorted", True) else [part.sort(dim).values for part in pair]
        if describe_differences(in_order[:1], in_order[1:], self._roundings):
            return results
        return (pair[1], own) if len(results) > 1 else (own,)


def _is_choice_of_distinct(indices: Tensor, x: Tensor, dim: int) -> bool:
    """Whether indices are those of distinct elements of ``x`` along ``dim``."""
    if not x.ndim or not indices.numel() or int(indices.min()) < 0 or int(indices.max()) >= x.shape[dim]:
        return False
    return bool((indices.sort(dim).values.diff(dim=dim) > 0).all())
