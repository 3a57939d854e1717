"""Capture models with Python loops over positions: roll the loops of two traces, and unify them for any length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from clika_ref.capture.control_flow import declare_body_symbols
from clika_ref.capture.dimensions import InputComparison, InputDim, resize_leaves
from clika_ref.capture.loops.length_unification import LengthPair, unify_lengths
from clika_ref.capture.loops.loop_rolling import roll_loops
from clika_ref.capture.messages import MismatchError
from clika_ref.capture.program import TracedGraph
from clika_ref.capture.symbols import TracedGuard
from clika_ref.core.ir import Graph, walk
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import Guard, Symbol, SymbolSource
from clika_ref.core.types import Dim

TRACED_LENGTHS = (5, 16)
"""The lengths, from and to, at which loops are traced: enough iterations to compare, and few to trace."""

MISSING_ITERATIONS = 2
"""Maximum number of positions for which a loop has no iteration, such as the first one."""


MIN_ITERATIONS = 3
"""Minimum number of equal calls of one line that count as a loop."""


@dataclass(frozen=True)
class FixedLength:
    """Dims with equal sizes in all inputs, those of them that a loop runs over, and the lengths to trace at."""

    group: Sequence[InputDim]
    dims: Sequence[InputDim]
    first: int
    second: int


@dataclass(frozen=True)
class RolledGraph:
    """A graph with loops, the inputs that it was traced with, and the bounds of the lengths that it was traced at."""

    result: TracedGraph
    leaves: list[Any]
    bounds: Sequence[tuple[sympy.Basic, sympy.Basic]]

    def require_other_length(self) -> None:
        """Check that a run at a length beyond the traced ones agreed with eager, after the validation of the graph.

        Raises:
            MismatchError: two lengths agree by construction, so they are no evidence for others.
        """
        kept = {guard.guard.relation for guard in self.result.guards}
        for lower, upper in self.bounds:
            if lower in kept and upper in kept:
                raise MismatchError(
                    f"the graph agrees with eager only at the two lengths that it was traced at ({lower}, {upper}): "
                    "the Python code computes other graphs for other lengths. Make each position compute the same"
                )


def find_fixed_lengths(comparison: InputComparison, graph: Graph, leaves: Sequence[Any]) -> list[FixedLength]:
    """Return the dynamic dims of the inputs that a graph, traced with ``leaves``, fixes to a number."""
    inputs = {value.name: value for value in graph.inputs}
    found: list[FixedLength] = []
    taken = {leaves[d.leaf] if d.dim is None else leaves[d.leaf].shape[d.dim] for d in comparison.sizes}
    for group in comparison.groups:
        held = [(d, d.dim, inputs.get(comparison.names[d.leaf])) for d in group if d.dim is not None]
        fixed = [d for d, dim, value in held if value is not None and isinstance(value.type.shape[dim], int)]
        if not fixed:
            continue
        fixed += [
            d for d, dim, value in held if value is not None and _reads_each_position(graph, value.type.shape[dim])
        ]
        current, given = leaves[fixed[0].leaf].shape[fixed[0].dim], comparison.sizes[fixed[0]]
        low, high = TRACED_LENGTHS
        free = [n for n in (*given, *range(low + 2, high + 1, 2), *range(low, high)) if low <= n <= high]
        first = current if low <= current <= high else next(n for n in free if n not in taken)
        taken.add(first)
        second = next(n for n in free if n not in taken)
        taken.add(second)
        found.append(FixedLength(group, fixed, first, second))
    return found


def _reads_each_position(graph: Graph, size: Dim) -> bool:
    """Whether a graph selects single positions along dims of a dynamic size, as a loop over rows of an input does."""
    if not isinstance(size, sympy.Symbol):
        return False
    selections = [node for node in graph.nodes if node.op_type == "select"]
    return sum(n.first_tensor.type.shape[n.attrs["dim"]] == size for n in selections) >= MIN_ITERATIONS


def find_unrolled_line(graph: Graph, lengths: Sequence[FixedLength], leaves: Sequence[Any]) -> str:
    """Return the line of the model that a trace ran for each position of a fixed length, ``""`` if there is none."""
    calls = Counter((node.origin.line, node.op_type) for node in graph.nodes if node.origin.line)
    for fixed in lengths:
        dim = fixed.dims[0]
        positions = leaves[dim.leaf].shape[dim.dim]
        least = max(positions - MISSING_ITERATIONS, MIN_ITERATIONS)
        for (line, _), count in calls.items():
            if count >= least:
                return line
    return ""


def capture_loops(
    comparison: InputComparison,
    leaves: Sequence[Any],
    lengths: Sequence[FixedLength],
    trace: Callable[[list[Any], Collection[InputDim]], TracedGraph],
    operators: Mapping[str, Operator],
) -> RolledGraph | None:
    """Return a graph for any length; None if the model has no unrolled loop.

    Args:
        comparison: the inputs, and the dims that differ.
        leaves: the inputs of the trace that fixes lengths.
        lengths: the fixed lengths.
        trace: traces the model with given leaves, and with some dims static.
        operators: those of the registry.

    Raises:
        MismatchError: the loops compute other graphs for other lengths.
    """
    sizes = {dim: fixed.first for fixed in lengths for dim in fixed.group}
    base = resize_leaves(list(leaves), sizes)
    static = {dim for fixed in lengths for dim in fixed.dims}
    result = trace(base, static)
    if not _roll(result.graph, operators, [fixed.first for fixed in lengths]):
        return None
    known: dict[sympy.Symbol, int] = {}
    same: dict[sympy.Symbol, sympy.Symbol] = {}
    for fixed in lengths:
        other = trace(resize_leaves(base, dict.fromkeys(fixed.group, fixed.second)), static)
        _roll(other.graph, operators, [f.second if f is fixed else f.first for f in lengths])
        symbol, others = _declare_length(result.graph, comparison, fixed)
        unify_lengths(result, other, LengthPair(symbol, fixed.first, fixed.second), known)
        known[symbol] = fixed.first
        same.update(dict.fromkeys(others, symbol))
    _declare_symbols_of_bodies(result.graph)
    guards = [replace(g, guard=replace(g.guard, relation=g.guard.relation.xreplace(same))) for g in result.guards]
    result.guards = [g for g in guards if not _is_from_fixed_length(g, known)]
    bounds = [
        (sympy.Ge(symbol, min(fixed.first, fixed.second)), sympy.Le(symbol, max(fixed.first, fixed.second)))
        for symbol, fixed in zip(known, lengths, strict=True)
    ]
    result.guards += [TracedGuard(Guard(bound, ""), is_testable=True) for pair in bounds for bound in pair]
    return RolledGraph(result, base, bounds)


def _roll(graph: Graph, operators: Mapping[str, Operator], lengths: Sequence[int]) -> int:
    counts = {length - missing for length in lengths for missing in range(MISSING_ITERATIONS + 1)}
    return roll_loops(graph, operators, counts)


def _declare_length(
    graph: Graph, comparison: InputComparison, fixed: FixedLength
) -> tuple[sympy.Symbol, list[sympy.Symbol]]:
    """Declare the symbol of a length, read from its first dim; return it, and the removed ones of the others."""
    names = {(comparison.names[d.leaf], d.dim): d for d in fixed.dims}
    known = [s for s in graph.symbols.values() if (s.source.name, s.source.dim) in names]
    for symbol in known:
        del graph.symbols[symbol.name]
    (name, dim), *_ = names
    first = next((s for s in known if (s.source.name, s.source.dim) == (name, dim)), None)
    first = first or Symbol(f"{name}_{dim}".replace(".", "_"), 0, None, SymbolSource(name, dim))
    graph.symbols[first.name] = first
    return first.expr, [s.expr for s in known if s is not first]


def _declare_symbols_of_bodies(graph: Graph) -> None:
    """Declare the symbols in the bodies of loops; those that no input of a body shows become operands."""
    for node in list(walk(graph)):
        if node.op_type == "scan":
            node.inputs = (*node.inputs, *declare_body_symbols(node.bodies))
    graph.mark_changed()


def _is_from_fixed_length(guard: TracedGuard, known: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a guard only states that a length is that of the trace, or at least that."""
    relation = guard.guard.relation
    if not relation.free_symbols & known.keys():
        return False
    return isinstance(relation, sympy.Eq) or guard.is_testable
