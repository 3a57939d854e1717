"""Random graphs grown from the samples of operators, as test cases."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch
from hypothesis import strategies as st

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Choice, IntegerRange, TensorSample, random_draw, realize
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import (
    compute_eager_values,
    has_undefined_calls,
    is_zero_sign_sensitive,
    type_of,
)
from clika_ref_conformance.drawing.generation import collect
from clika_ref_conformance.drawing.graphs.graph_generator import DEFAULT_RANGE, GraphGenerator, accept_all
from clika_ref_conformance.suite import Suite

MIN_NODES, MAX_NODES = 6, 30
"""Minimum and maximum number of nodes of a graph."""
MAX_REJECTIONS = 3
"""Rejected calls of an operator before a graph drops it, such as calls with data-dependent sizes."""
EXCLUDED_OPERATORS = frozenset({"as_strided", "as_strided_scatter", "searchsorted"})
"""Excluded operators: they read the memory of a tensor, or need sorted elements, which samples do not describe."""


def select_graph_operators(operators: Mapping[str, Operator]) -> list[Operator]:
    """Return the operators that graphs are grown from: they have samples and are not always random."""
    return [o for o in operators.values() if o.sampler and o.random is not True and o.name not in EXCLUDED_OPERATORS]


def grow_graph(operators: Sequence[Operator], drawing: GraphGenerator) -> GraphGenerator:
    """Grow a graph of 6 to 30 nodes from a random subset of 3 to 6 operators, and give it outputs.

    With probability 0.3, an earlier operator is applied to its operand again, with other attributes, such as two clamps
    of one tensor. Whether to continue is drawn before the content of a node, so that shrinking can delete a node as one
    span.
    """
    draw, graph = drawing.draw, drawing.builder.graph
    swarm = [operators[draw(IntegerRange(0, len(operators) - 1))] for _ in range(draw(IntegerRange(3, 6)))]
    motifs: list[tuple[Operator, Value]] = []
    attempts = 0
    while attempts < 2 * MAX_NODES and len(graph) < MAX_NODES:
        attempts += 1
        if len(graph) >= MIN_NODES and draw(IntegerRange(0, 19)) == 0:
            break
        op, first = swarm[draw(IntegerRange(0, len(swarm) - 1))], None
        if motifs and draw(IntegerRange(0, 9)) >= 7:
            op, first = motifs[draw(IntegerRange(0, len(motifs) - 1))]
        if drawing.count_rejections(op) >= MAX_REJECTIONS:
            swarm = [o for o in swarm if o is not op] or [operators[draw(IntegerRange(0, len(operators) - 1))]]
            continue
        node = drawing.add(op, first)
        operands = [v for v in node.inputs if isinstance(v, Value)] if node is not None else []
        if operands:
            motifs.append((op, operands[0]))
    add_outputs(drawing)
    return drawing


def add_outputs(drawing: GraphGenerator) -> None:
    """Add the unread values as outputs, and sometimes an inner value, an input, a constant or a duplicate."""
    graph, draw = drawing.builder.graph, drawing.draw
    results = [v for n in graph.nodes for v in n.outputs]
    sinks = [v for v in results if not v.uses and (v.index == 0 or draw(Choice((True, False))))]
    for value in sinks:
        if len(sinks) == 1 or draw(IntegerRange(0, 7)) < 7:  # the skipped sinks are dead code
            graph.add_output(value)
    for group in (results, graph.inputs, list(graph.constants.values()), list(graph.outputs)):
        if group and draw(IntegerRange(0, 6)) == 6:
            graph.add_output(group[draw(IntegerRange(0, len(group) - 1))])
    if draw(IntegerRange(0, 6)) == 6 or not graph.inputs:
        unused = TensorSample(torch.float32, (2, 3), *DEFAULT_RANGE)
        value = graph.add_input(type_of(torch.empty(2, 3)), "unused")
        drawing.samples.append(unused)
        drawing.builder.tensors[value] = realize(unused, torch.Generator().manual_seed(drawing.seed))
    if not graph.outputs and results:
        graph.add_output(results[-1])


def make_graph_case_strategy(
    operators: Sequence[Operator], unsupported_reason: Callable[[Node], str | None] = accept_all
) -> st.SearchStrategy[GraphCase]:
    """Return a strategy of whole graphs with inputs, each generated from a seed of its own.

    If Hypothesis draws every decision, most graphs are mutations of one another: 200 graphs had 51 distinct sets of
    operators, against 200 from seeds. The only gain would be Hypothesis's shrinking, and the reducer does that better.
    """

    def grow_case(seed: int) -> GraphCase:
        random = Random(seed)  # noqa: S311 - draws keep no secret
        drawing = grow_graph(operators, GraphGenerator(random_draw(random), unsupported_reason, seed=seed % 2**32))
        return make_case(drawing, f"grown-{seed}", random)

    return st.integers(0, 2**62).map(grow_case)


def draw_graph_cases(suite: Suite, count: int, seed: int) -> list[GraphCase]:
    """Return random graphs of nodes that the target of a suite supports, or fewer if there are no more."""
    operators = select_graph_operators(suite.registry.operators)
    return collect(make_graph_case_strategy(operators, suite.target.unsupported_reason), count, seed)


def compute_graph_seed(name: str, suite: Suite) -> int:
    """Return a seed for the graphs of a task or level, which differs between the seeds of a profile."""
    return zlib.crc32(f"{name}/{suite.profile.seed}".encode()) % 2**24


SPECIAL_VALUES = (math.nan, math.inf, -math.inf, -0.0)


def make_case(drawing: GraphGenerator, name: str, random: Random) -> GraphCase:
    """Return the case of a grown graph.

    Its runs have the inputs that the graph was grown on, newly drawn ones, and ones with a special element.
    """
    graph = drawing.builder.graph
    typical = CaseRun("typical", tuple(drawing.builder.tensors[v] for v in graph.inputs))
    runs = [typical]
    for kind in ("drawn", "special"):
        inputs = [realize(s, torch.Generator().manual_seed(random.getrandbits(31))) for s in drawing.samples]
        if kind == "special":
            _place_special(inputs, random)
        runs.append(CaseRun(kind, tuple(inputs)))
    runs = [run for run in runs if _is_legal(graph, run.inputs)] or [typical]
    used = sorted({n.op_type for n in graph.nodes})
    return GraphCase(name, graph, runs, {"operators": used, "nodes": len(graph)})


def _place_special(inputs: list[torch.Tensor], random: Random) -> None:
    """Set the first or last element of one float input to NaN, an infinity or negative zero."""
    floats = [t for t in inputs if t.is_floating_point() and t.numel()]
    if floats:
        flat = random.choice(floats).reshape(-1)
        flat[random.choice((0, -1))] = random.choice(SPECIAL_VALUES)


def _is_legal(graph: Graph, inputs: Sequence[torch.Tensor]) -> bool:
    try:
        values = compute_eager_values(graph, inputs)
        return not has_undefined_calls(graph, values) and not is_zero_sign_sensitive(graph, values)
    except ClikaError:
        return False
