"""Merge nodes that compute the same result from the same operands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import sympy
import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.rewriter import can_substitute, substitute
from clika_ref_cleanup.cleanup_pass import CleanupPass

LITERAL_TYPES = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, sympy.Basic)
"""Types with interchangeable elements exactly if type and value are equal."""


class MergeCommonSubexpressions(CleanupPass):
    """Merge calls of one operator with equal operands and attributes, except random ones and control flow.

    Numbers are equal only if their types and bits are: 1, 1.0 and True differ, and so do 0.0 and -0.0.
    """

    name = "merge-common-subexpressions"
    after = ("merge-chains", "push-slices", "remove-identities")

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Merge each node, in order, into an earlier equal one; its operands are already merged."""
        first: dict[Hashable, Node] = {}
        bound = {symbol.source.name for symbol in graph.symbols.values()}
        for node in graph.nodes:
            if node.op.random:
                continue
            twin = first.setdefault(call_key(node), node)
            pairs = list(zip(node.outputs, twin.outputs, strict=True))
            if twin is node or any(old.name in bound for old, _ in pairs):
                continue
            if all(can_substitute(graph, old, new) for old, new in pairs):
                for old, new in pairs:
                    substitute(graph, old, new)
                graph.erase(node)


def call_key(node: Node) -> Hashable:
    """Return a key that is equal for two calls exactly if they compute the same."""
    attrs = tuple((name, literal_key(node.attrs[name])) for name in sorted(node.attrs))
    types = tuple(value.type for value in node.outputs)
    return node.op, tuple(map(literal_key, node.inputs)), attrs, types, node.bodies


def literal_key(item: Any) -> Hashable:
    """Return a key that is equal for two operands or attributes exactly if they are interchangeable.

    >>> literal_key(1) == literal_key(True), literal_key(0.0) == literal_key(-0.0), literal_key(2.5) == literal_key(2.5)
    (False, False, True)
    """
    if isinstance(item, Value):
        return item
    if isinstance(item, tuple):
        return (tuple, *map(literal_key, item))
    if isinstance(item, float):
        return float, item.hex()
    if isinstance(item, LITERAL_TYPES):
        return type(item), item
    return object()  # unknown, hence unequal to everything
