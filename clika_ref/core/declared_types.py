"""Check of the results of nodes against the types that the graph declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node
from clika_ref.core.symbols import resolve


class DeclaredTypes:
    """The declared types of a graph, at the sizes of one call; data-dependent lengths are not checked.

    Args:
        graph: the graph that declares the types.
        inputs: one tensor for each input of the graph, in order. The sizes are read from their shapes.
    """

    def __init__(self, graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
        self._sizes = read_sizes(graph, inputs)
        self._shapes: dict[tuple[Any, ...], Any] = {}

    def find_mismatches(self, node: Node, results: Sequence[torch.Tensor]) -> Iterator[str]:
        """Yield an error for each result with readers that has another dtype or shape than declared.

        Results without readers are skipped: PyTorch's fake kernels declare other dtypes for these than its CPU kernels
        make (the mean and the deviation of `torch.native_layer_norm` on bfloat16).

        Args:
            node: a node of the graph.
            results: the computed tensors, one for each output of the node, in order.

        Raises:
            ModelError: a declared shape contains a function that `evaluate` does not know.
        """
        for value, result in zip(node.outputs, results, strict=True):
            if not value.uses:
                continue
            shape = self._shape(value.type.shape)
            if result.dtype != value.type.dtype or (shape is not None and result.shape != shape):
                yield f"{node!r}: returns {result.dtype}{list(result.shape)}, not the type that the graph declares"

    def _shape(self, stated: tuple[Any, ...]) -> tuple[int, ...] | None:
        if stated not in self._shapes:
            symbols = {str(s) for size in stated for s in getattr(size, "free_symbols", ())}
            self._shapes[stated] = resolve(stated, self._sizes) if symbols <= self._sizes.keys() else None
        return self._shapes[stated]
