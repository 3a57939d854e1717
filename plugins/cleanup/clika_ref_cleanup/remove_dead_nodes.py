"""Remove nodes without readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy

from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref_cleanup.cleanup_pass import CleanupPass


class RemoveDeadNodes(CleanupPass):
    """Erase each node with no reader among nodes, outputs, state entries and needed symbols.

    A symbol defined by a node's output (``nonzero``) is needed if a kept node, a guard or an output mentions it;
    otherwise it is erased with its node. Random nodes are erased too: this only shifts the random number stream.
    """

    name = "remove-dead-nodes"

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Erase in one backward walk, so that nodes that become unused on the way are erased too."""
        bound: dict[str, list[str]] = {}
        for symbol in graph.symbols.values():
            bound.setdefault(symbol.source.name, []).append(symbol.name)
        needed = set(_symbols(guard.relation for guard in graph.guards))
        needed.update(_symbols(value.type.shape for value in (*graph.outputs, *graph.state.values())))
        for node in graph.nodes_backward():
            symbols = [name for value in node.outputs for name in bound.get(value.name, ())]
            if any(value.uses for value in node.outputs) or needed.intersection(symbols):
                needed.update(_collect_used_symbols(node))
                continue
            graph.erase(node)
            for name in symbols:
                del graph.symbols[name]


def _collect_used_symbols(node: Node) -> Iterator[str]:
    yield from _symbols(node.attrs.values())
    yield from _symbols(item for item in node.inputs if isinstance(item, sympy.Basic))
    yield from _symbols(value.type.shape for value in node.outputs)


def _symbols(items: Iterable[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, tuple):
            yield from _symbols(item)
        elif isinstance(item, sympy.Basic):
            yield from (str(symbol) for symbol in item.free_symbols)
