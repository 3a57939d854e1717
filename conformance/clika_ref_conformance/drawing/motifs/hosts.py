"""Random graphs around a motif, with nodes before, next to and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.motifs.call_generator import CallGenerator
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder

NODE_COUNT_RANGE = (1, 4)
"""Minimum and maximum number of nodes drawn before a motif and after it."""

POOL_SIZE = 6
"""Number of most recent values to choose operands from."""


def embed_motif(
    random: Random, motif: GraphCase, operators: Mapping[str, Operator], groups: Sequence[Sequence[str]]
) -> GraphCase | None:
    """Draw nodes, add a motif that reads them where types match, and draw more nodes; None if that is illegal."""
    new = CaseRebuilder.of(motif)
    drawing = CallGenerator(random, new.builder, 0.7, random.choice((0.1, 0.5)))
    swarm = [random.choice(random.choice(groups) if groups else sorted(operators)) for _ in range(2)]
    swarm += random.choices(sorted(operators), k=3)
    pool: list[Value] = []
    _draw_nodes(random, drawing, pool, swarm, operators)
    new.add_leaves()
    for value in motif.graph.inputs:
        alike = [v for v in pool if v.type == value.type]
        if alike and random.random() < 3 / 4:
            new.mapping[value] = random.choice(alike)
    if not new.add_nodes():
        return None
    own = [v for node in motif.graph.nodes for v in map(new.map_operand, node.outputs)]
    returned = [new.map_operand(v) for v in motif.graph.outputs if random.random() < 1 / 2]
    pool = [*pool[-2:], *own]
    _draw_nodes(random, drawing, pool, swarm, operators)
    unread = [v for node in new.builder.graph.nodes for v in node.outputs if not v.uses]
    dead = {v for v in unread if len(unread) > 1 and random.random() < 1 / 10}
    outputs = [v for v in dict.fromkeys([*returned, *unread]) if v not in dead or v in returned]
    return new.builder.finish(f"around {motif.name}", outputs)


def _draw_nodes(
    random: Random, drawing: CallGenerator, pool: list[Value], swarm: Sequence[str], operators: Mapping[str, Operator]
) -> None:
    for _ in range(random.randint(*NODE_COUNT_RANGE)):
        node = drawing.call(operators[random.choice(swarm)], pool)
        if node is not None:
            pool.extend(node.outputs)
            del pool[:-POOL_SIZE]
