"""Find the guards that an artifact must check: runtimes know none, and the module checks all on each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import sympy

from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard
from clika_ref.torch_internals.symbols import torch_sympy

MIN_FUNCTIONS = (sympy.Min, torch_sympy.Min)


def find_needed_guards(graph: Graph) -> list[Guard]:
    """Return the guards of a graph, except those that hold whenever no dim is 0."""
    found = {g.relation: g for g in map(_simplify, graph.guards)}
    signs: dict[Any, Any] = {}
    for symbol in graph.symbols.values():
        if symbol.source.dim is not None:
            signs[symbol.expr] = sympy.Dummy(integer=True, nonnegative=True) + 1
        elif sympy.Ge(symbol.expr, 0) in found:
            signs[symbol.expr] = sympy.Dummy(integer=True, nonnegative=True)
    return [g for g in found.values() if not _is_always_met(g, signs) and not _is_implied(g, found)]


def _simplify(guard: Guard) -> Guard:
    """Rewrite ``n == min(n, k)``, PyTorch's form for slices, as ``n <= k``."""
    equalities: dict[Any, Any] = {e: _to_inequalities(e) for e in guard.relation.atoms(sympy.Eq)}
    return replace(guard, relation=guard.relation.xreplace(equalities))


def _to_inequalities(equality: Any) -> Any:
    for least, other in (equality.args, reversed(equality.args)):
        if isinstance(least, MIN_FUNCTIONS) and other in least.args:
            return sympy.And(*(other <= arg for arg in least.args if arg != other))
    return equality


def _is_implied(guard: Guard, found: dict[sympy.Basic, Guard]) -> bool:
    """Whether a guard is a disjunction, and another guard already states one of its terms."""
    return isinstance(guard.relation, sympy.Or) and any(choice in found for choice in guard.relation.args)


def _is_always_met(guard: Guard, signs: dict[Any, Any]) -> bool:
    """Whether a guard holds for all dims of at least 1, as far as this can be decided.

    Args:
        guard: the guard.
        signs: symbols, and an expression for each that sympy knows to be positive or not negative.
    """
    if isinstance(guard.relation, sympy.Ge) and guard.relation.lhs in signs and guard.relation.rhs == 0:
        return bool(signs[guard.relation.lhs].is_positive)  # the guard that states the sign itself
    relation: Any = guard.relation.xreplace(signs)
    if relation in (sympy.true, sympy.false):
        return relation is sympy.true
    if isinstance(relation, sympy.Ne):
        lhs, rhs = (cast("Any", part) for part in relation.args)
        gap = sympy.expand(lhs - rhs)
        return bool(gap.is_positive or gap.is_negative)
    if not isinstance(relation, sympy.Gt | sympy.Lt | sympy.Ge | sympy.Le):
        return False
    ends: tuple[Any, Any] = relation.gts, relation.lts
    gap = sympy.expand(ends[0] - ends[1])
    return bool(gap.is_positive if isinstance(relation, sympy.Gt | sympy.Lt) else gap.is_nonnegative)
