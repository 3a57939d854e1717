"""Equivalent variants of a graph, which a compiler must treat alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import compute_eager_values

Operators = Mapping[str, Operator]


def make_variant(case: GraphCase, kind: str, operators: Operators, random: Random) -> GraphCase | None:
    """Return a case with an equivalent graph of this kind, or None if it does not apply.

    Eager must return the same for every run, bit for bit except for the sign of zeros.
    """
    changed = VARIANTS[kind](replace(case, graph=case.graph.clone()), operators, random)
    if changed is None or not _is_equal(case, changed):
        return None
    return replace(changed, name=f"{case.name}, {kind}")


def _is_equal(case: GraphCase, changed: GraphCase) -> bool:
    try:
        for old, new in zip(case.runs, changed.runs, strict=False):  # a variant may keep the first run only
            before, after = (
                compute_eager_values(case.graph, old.inputs),
                compute_eager_values(changed.graph, new.inputs),
            )
            for a, b in zip(case.graph.outputs, changed.graph.outputs, strict=False):
                if not torch.equal(before[a].nan_to_num(nan=0.5), after[b].nan_to_num(nan=0.5)):
                    return False
    except ClikaError:
        return False
    return True


def _shuffle_uses(graph: Graph, random: Random) -> list[tuple[Value, Use]]:
    """Return every use of a float by a node, in random order."""
    values = [*graph.inputs, *graph.constants.values(), *(v for n in graph.nodes for v in n.outputs)]
    found = [(v, use) for v in values if v.type.dtype.is_floating_point for use in v.uses if isinstance(use.user, Node)]
    random.shuffle(found)
    return found


Rewrite = Callable[[Builder, Value], Value]


def _rewrite_use(
    case: GraphCase, operators: Operators, random: Random, rewrite: Rewrite, rank: int = 0
) -> GraphCase | None:
    """Replace a value by the result of ``rewrite`` for one of its readers."""
    for value, use in _shuffle_uses(case.graph, random):
        if value.type.rank >= rank and isinstance(use.user, Node):
            made = rewrite(Builder(case.graph, operators, use.user), value)
            case.graph.set_input(use.user, int(use.position), made)
            return case
    return None


def _insert_identity_reshape(case: GraphCase, operators: Operators, random: Random) -> GraphCase | None:
    return _rewrite_use(case, operators, random, lambda build, v: build("reshape", v, shape=v.type.shape))


def _insert_double_transpose(case: GraphCase, operators: Operators, random: Random) -> GraphCase | None:
    def rewrite(build: Builder, value: Value) -> Value:
        order = list(range(value.type.rank))
        random.shuffle(order)
        there = build("permute", value, dims=tuple(order))
        return build("permute", there, dims=tuple(order.index(i) for i in range(len(order))))

    return _rewrite_use(case, operators, random, rewrite, rank=2)


def _add_zero(case: GraphCase, operators: Operators, random: Random) -> GraphCase | None:
    return _rewrite_use(case, operators, random, lambda build, v: build("add", v, 0))


def _insert_dead_code(case: GraphCase, operators: Operators, random: Random) -> GraphCase | None:
    for value, use in _shuffle_uses(case.graph, random):
        if isinstance(use.user, Node):
            build = Builder(case.graph, operators, use.user)
            build("mul", build("neg", value), value)
            return case
    return None


def _turn_constant_into_input(case: GraphCase, _: Operators, random: Random) -> GraphCase | None:
    graph = case.graph
    constants = [v for v in graph.constants.values() if v.uses]
    if not constants:
        return None
    constant = random.choice(constants)
    data = constant.data
    assert data is not None
    value = graph.add_input(constant.type, "weight")
    graph.replace(constant, value)
    graph.drop_unused_constants()
    return replace(case, runs=[replace(run, inputs=(*run.inputs, data)) for run in case.runs])


def _turn_input_into_constant(case: GraphCase, _: Operators, random: Random) -> GraphCase | None:
    graph, run = case.graph, case.runs[0]
    if len(graph.inputs) < 2:
        return None
    index = random.randrange(len(graph.inputs))
    graph.replace(graph.inputs[index], graph.add_constant(run.inputs[index], "weight"))
    del graph.inputs[index]
    inputs = (*run.inputs[:index], *run.inputs[index + 1 :])
    return replace(case, runs=[CaseRun(run.name, inputs)])


def _duplicate_output(case: GraphCase, _: Operators, random: Random) -> GraphCase | None:
    if not case.graph.outputs:  # the target rejected all drawn calls
        return None
    case.graph.add_output(random.choice(case.graph.outputs))
    return case


def _split_batch(case: GraphCase, operators: Operators, random: Random) -> GraphCase | None:
    """Compute one node in two halves of its first dim, if eager confirms that it is independent along it."""
    nodes = [n for n in case.graph.nodes if len(n.outputs) == 1 and n.output.uses]
    random.shuffle(nodes)
    for node in nodes:
        first, *rest = node.inputs or [None]
        if not isinstance(first, Value) or first.type.rank == 0 or any(isinstance(v, Value) for v in rest):
            continue
        length = first.type.shape[0]
        if not isinstance(length, int) or length < 2 or node.output.type.shape[:1] != (length,):
            continue
        trial = case.graph.clone()
        twin = next(n for n in trial.nodes if n.name == node.name)
        changed = replace(case, graph=trial)
        try:
            _split_node(trial, twin, operators, random.randrange(1, length))
        except ClikaError:
            continue
        if _is_equal(case, changed):
            return changed
    return None


def _split_node(graph: Graph, node: Node, operators: Operators, place: int) -> None:
    build = Builder(graph, operators, node)
    halves = [(0, place), (place, None)]
    parts = [
        build(node.op, build("slice", node.inputs[0], dim=0, start=a, end=b), *node.inputs[1:], **node.attrs)
        for a, b in halves
    ]
    whole = build("cat", *parts, dim=0)
    graph.replace(node.output, whole)
    graph.erase(node)


VARIANTS: Mapping[str, Callable[[GraphCase, Operators, Random], GraphCase | None]] = {
    "dead code": _insert_dead_code,
    "identity reshape": _insert_identity_reshape,
    "double transpose": _insert_double_transpose,
    "added zero": _add_zero,
    "constant as input": _turn_constant_into_input,
    "input as constant": _turn_input_into_constant,
    "output twice": _duplicate_output,
    "batch split": _split_batch,
}
