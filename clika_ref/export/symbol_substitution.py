"""Replacement of the symbols of a graph by other symbols, or by fixed lengths."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from clika_ref.core.ir import Graph, walk_graphs
from clika_ref.core.symbols import Symbol, evaluate, is_symbolic
from clika_ref.core.types import TensorType


def substitute_symbols(graph: Graph, mapping: Mapping[sympy.Symbol, Any]) -> None:
    """Replace symbols by others, or by integers, in all types, operands, attributes and guards.

    The caller updates ``Graph.symbols`` of the graph itself. A guard without remaining symbols is dropped.

    Args:
        graph: the graph to change in place.
        mapping: the new symbol, expression or integer for each symbol to replace.

    Raises:
        ModelError: an expression without remaining symbols contains a function that `evaluate` does not know.
    """

    def substitute(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(substitute, item))
        if not isinstance(item, sympy.Basic):
            return item
        result = item.xreplace(mapping)
        return evaluate(result, {}) if not result.free_symbols else result

    for part in walk_graphs(graph):
        for value in part.inputs:
            value.type = TensorType(value.type.dtype, substitute(value.type.shape))
        for node in part.nodes:
            node.attrs = {k: substitute(v) for k, v in node.attrs.items()}
            for position, operand in enumerate(node.inputs):
                if isinstance(operand, sympy.Basic):
                    part.set_input(node, position, substitute(operand))
            for value in node.outputs:
                value.type = TensorType(value.type.dtype, substitute(value.type.shape))
        if part is not graph:
            part.symbols = _rename_symbols(part.symbols, mapping)
    guards = [replace(g, relation=substitute(g.relation)) for g in graph.guards]
    graph.guards = [g for g in guards if is_symbolic(g.relation)]
    graph.mark_changed()


def _rename_symbols(symbols: Mapping[str, Symbol], mapping: Mapping[sympy.Symbol, Any]) -> dict[str, Symbol]:
    """Return the symbols of a body under their new names, without those that became fixed."""
    kept: dict[str, Symbol] = {}
    for symbol in symbols.values():
        new = mapping.get(symbol.expr, symbol.expr)
        if isinstance(new, sympy.Symbol):
            kept.setdefault(new.name, replace(symbol, name=new.name))
    return kept
