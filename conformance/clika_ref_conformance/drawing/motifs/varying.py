"""Variants of motifs: one call is redrawn or gets another operator, and its readers are adapted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.eager_builder import LeafTensor
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS, CallGenerator
from clika_ref_conformance.drawing.motifs.near_misses import Operators, sample_attributes
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder

DRAWS_PER_NODE = 8
"""Number of calls drawn for each node in search of a motif."""

NEAR_MISS_DRAWS_PER_NODE = 3
"""Number of calls drawn for each node of a motif, whether or not they match its pattern."""

MAX_ATTRIBUTE_SETS = 3
"""Number of distinct attribute sets tried for another operator on the existing operands."""

MAX_RANDOM_OPERATORS = 6
"""Maximum number of random operators tried in place of each node."""

NEUTRAL_NUMBERS = (0, 1)
"""Numbers that are neutral in some operators."""

CallSpec = tuple[Operator, Sequence[Any], Mapping[str, Any]]
"""Operator, operands and attributes; values among the operands belong to a motif."""


def substitute_operator(
    random: Random, motif: GraphCase, operators: Operators, group: Sequence[str], kind: str, *, kin: bool
) -> Iterator[GraphCase]:
    """Yield the motif with an operator of a group in place of each node inside the group, or outside of it."""
    for position, node in enumerate(motif.graph.nodes):
        if kind not in UNSAFE_OPERATORS and kind != node.op_type and (node.op_type in group) is kin:
            yield from (_finish(new, motif) for new in _make_substitutions(random, motif, position, operators[kind]))


def redraw_each_call(random: Random, motif: GraphCase) -> Iterator[Iterator[GraphCase]]:
    """Yield, for each node, the variants of the motif with that call redrawn."""
    for position, node in enumerate(motif.graph.nodes):
        yield (_finish(new, motif) for new in _redraw_node(random, motif, position, node.op))


def _finish(new: CaseRebuilder, motif: GraphCase) -> GraphCase:
    return new.builder.finish("varied", [*(new.map_operand(v) for v in motif.graph.outputs), *new.unread])


def redraw_call(case: GraphCase, _: Operators, *, draws: int = NEAR_MISS_DRAWS_PER_NODE) -> Iterator[GraphCase | None]:
    """Redraw each call: with operands of other ranks and sizes, and other attributes that fit them."""
    random = Random(case.name)  # noqa: S311 - no secret
    for position, node in enumerate(case.graph.nodes):
        for new in _redraw_node(random, case, position, node.op, draws=draws):
            yield new.finish(f"{node.op_type} {position} drawn again", new.unread)


def _make_substitutions(random: Random, motif: GraphCase, position: int, op: Operator) -> Iterator[CaseRebuilder]:
    node = list(motif.graph.nodes)[position]
    for operands in _insert_neutral_numbers(node.inputs):
        for attrs in _find_distinct_attributes(op):
            yield from _replace_call(random, motif, position, (op, operands, attrs))
    yield from _redraw_node(random, motif, position, op)


def _insert_neutral_numbers(operands: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the operands unchanged, and with each number replaced by arithmetically neutral ones."""
    yield operands
    for i, item in enumerate(operands):
        if isinstance(item, int | float):
            yield from ([*operands[:i], number, *operands[i + 1 :]] for number in NEUTRAL_NUMBERS)


def _find_distinct_attributes(op: Operator) -> list[Mapping[str, Any]]:
    """Return the attributes of the first sampled calls that differ in them."""
    found = {repr(attrs): attrs for attrs in reversed(sample_attributes(op))}
    return [*reversed(found.values())][:MAX_ATTRIBUTE_SETS]


def _redraw_node(
    random: Random, motif: GraphCase, position: int, op: Operator, *, draws: int = DRAWS_PER_NODE
) -> Iterator[CaseRebuilder]:
    """Yield the motif with redrawn calls of an operator at a node, on results of other nodes and new leaves.

    Each call comes as drawn, with all attributes of the motif's call, and with each single one of them.
    """
    node = list(motif.graph.nodes)[position]
    for _ in range(draws if op.name not in UNSAFE_OPERATORS else 0):
        new = _rebuild_until(motif, position)
        drawn = new and CallGenerator(random, new.builder, 1.0).call(op, _make_operand_pool(random, new, node))
        if not new or drawn is None:
            continue
        operands = _map_operands(new, node, drawn)
        for attrs in _merge_attributes(node.attrs, drawn.attrs):
            yield from _replace_call(random, motif, position, (op, operands, attrs))


def _rebuild_until(motif: GraphCase, position: int) -> CaseRebuilder | None:
    """Rebuild the motif up to a node, excluding it."""
    new = CaseRebuilder.with_leaves(motif)
    return new if all(map(new.take, list(motif.graph.nodes)[:position])) else None


def _make_operand_pool(random: Random, new: CaseRebuilder, node: Node) -> list[Value]:
    """Return the new values for computed operands of a node, and half of the time also for those with other readers."""
    readers = 1 if random.random() < 1 / 2 else math.inf
    values = [v for v in node.inputs if isinstance(v, Value)]
    return [new.map_operand(v) for v in values if v.producer is not None or len(v.uses) > readers]


def _map_operands(new: CaseRebuilder, old: Node, drawn: Node) -> list[Any]:
    """Return the operands of a drawn call as values of the motif or as leaves, keeping inputs as inputs."""
    known = {twin: value for value, twin in new.mapping.items()}
    inputs = {i for i, v in enumerate(old.inputs) if isinstance(v, Value) and not v.is_constant and v.producer is None}
    return [
        known.get(v) or LeafTensor(new.builder.tensors[v], i not in inputs) if isinstance(v, Value) else v
        for i, v in enumerate(drawn.inputs)
    ]


def _merge_attributes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the drawn attributes, those with all old values, and those with each single old value that differs."""
    yield new
    carried = {name: _match_length(old[name], value) for name, value in new.items() if name in old}
    different = [name for name in carried if repr(carried[name]) != repr(new[name])]
    if len(different) > 1:
        yield {**new, **carried}
    yield from ({**new, name: carried[name]} for name in different)


def _match_length(old: Any, new: Any) -> Any:
    """Return an old value, or one of the new length for a tuple: constant or ascending, if the old one was."""
    if not (isinstance(old, tuple) and isinstance(new, tuple)) or len(old) == len(new):
        return old
    if old and len(set(old)) == 1:
        return old[:1] * len(new)
    return tuple(range(len(new))) if old == tuple(range(len(old))) else new


def _replace_call(random: Random, motif: GraphCase, position: int, call: CallSpec) -> Iterator[CaseRebuilder]:
    """Yield the motif with another call at a node, if it is legal.

    If a later node does not accept the new result, its other operands are redrawn.
    """
    op, operands, attrs = call
    new = _rebuild_until(motif, position)
    placed = new and new.builder.add_call(op, [new.map_operand(v) for v in operands], attrs)
    if new and placed and _substitute_node(new, list(motif.graph.nodes)[position:], placed, random):
        yield new


def _substitute_node(new: CaseRebuilder, nodes: Sequence[Node], placed: Node, random: Random) -> bool:
    """Use a call in place of the first of some nodes, and add the others; return whether that is legal."""
    first, *rest = nodes
    if len(placed.outputs) != len(first.outputs):
        return False
    new.mapping.update(zip(first.outputs, placed.outputs, strict=True))
    return all(
        (random.random() < 1 / 2 and _add_follower(random, new, node, keep=False))
        or new.take(node)
        or _add_follower(random, new, node, keep=True)
        for node in rest
    )


def _add_follower(random: Random, new: CaseRebuilder, node: Node, *, keep: bool) -> bool:
    """Add a node on operands that match its inputs, keeping its attributes if asked and legal."""
    for _ in range(DRAWS_PER_NODE // 2 if node.op_type not in UNSAFE_OPERATORS else 0):
        drawn = CallGenerator(random, new.builder, 1.0, 1.0).call(node.op, _make_operand_pool(random, new, node))
        if drawn is not None and len(drawn.outputs) == len(node.outputs):
            kept = new.builder.add_call(node.op, drawn.inputs, node.attrs) if keep else None
            if kept is not None and len(kept.outputs) == len(node.outputs):
                chosen, spare = kept, drawn
            else:
                chosen, spare = drawn, kept
            if spare is not None:
                new.builder.graph.erase(spare)
            new.mapping.update(zip(node.outputs, chosen.outputs, strict=True))
            return True
    return False


def substitute_random_operators(case: GraphCase, operators: Operators) -> Iterator[GraphCase | None]:
    """Replace each node by random operators on the same operands."""
    random = Random(case.name)  # noqa: S311 - no secret
    drawing = [
        op for name, op in sorted(operators.items()) if op.random and op.sampler and name not in UNSAFE_OPERATORS
    ]
    nodes = list(case.graph.nodes)
    for position, node in enumerate(nodes):
        tensors = [v for v in node.inputs if isinstance(v, Value)]
        for op in (
            random.sample(drawing, min(MAX_RANDOM_OPERATORS, len(drawing)))
            if tensors and node.op_type not in UNSAFE_OPERATORS
            else ()
        ):
            new = _rebuild_until(case, position)
            placed = new and CallGenerator(random, new.builder, 1.0, 1.0).call(
                op, [new.map_operand(v) for v in tensors]
            )
            if new and placed and _substitute_node(new, nodes[position:], placed, random):
                yield new.finish(f"{op.name} at {position}", new.unread)
