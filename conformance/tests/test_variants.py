"""Variants of a graph are equivalent in eager; the level of whole graphs runs them, and reduces failures."""

from dataclasses import replace
from random import Random

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import compute_eager_values
from clika_ref_conformance.drawing.graphs.variants import VARIANTS, make_variant
from clika_ref_conformance.levels import graphs
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from faulty_targets import Negating, PartialTarget

from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()


def make_two_layer_graph():
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    x = graph.add_input(TensorType(torch.float32, (4, 3)), "x")
    y = graph.add_input(TensorType(torch.float32, (4, 5)), "y")
    hidden = build("gelu", build("linear", x, graph.add_constant(torch.randn(5, 3), "w")))
    graph.add_output(build("softmax", build("add", hidden, y), dim=-1))
    inputs = (torch.randn(4, 3), torch.randn(4, 5))
    return GraphCase("layers", graph, [CaseRun("typical", inputs), CaseRun("drawn", tuple(-t for t in inputs))])


@pytest.mark.parametrize("kind", VARIANTS)
def test_make_variant_changes_graph_not_results(kind):
    """A variant is another graph with the same results."""
    case = make_two_layer_graph()
    before = str(case.graph)
    changed = make_variant(case, kind, REGISTRY.operators, Random(0))
    assert changed.name == f"layers, {kind}"
    verify(changed.graph)
    assert str(changed.graph) != before
    assert str(case.graph) == before
    for old, new in zip(case.runs, changed.runs, strict=False):
        (expected,), results = (
            [compute_eager_values(c.graph, run.inputs)[v] for v in c.graph.outputs]
            for c, run in ((case, old), (changed, new))
        )
        assert all(torch.equal(expected, r) for r in results)


def test_make_variant_batch_split_needs_independent_batch():
    """A batch is split only if the node works along it."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    x = graph.add_input(TensorType(torch.float32, (4, 3)), "x")
    graph.add_output(build("softmax", x, dim=0))
    case = GraphCase("softmax", graph, [CaseRun("typical", (torch.randn(4, 3),))])
    assert make_variant(case, "batch split", REGISTRY.operators, Random(0)) is None


def test_make_variant_impossible_returns_none():
    """A variant that is impossible returns None."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    x = graph.add_input(TensorType(torch.int64, (4,)), "x")
    graph.add_output(build("neg", x))
    case = GraphCase("int", graph, [CaseRun("typical", (torch.arange(4),))])
    for kind in ("dead code", "identity reshape", "double transpose", "added zero"):
        assert make_variant(case, kind, REGISTRY.operators, Random(0)) is None
    assert make_variant(case, "input as constant", REGISTRY.operators, Random(0)) is None
    assert make_variant(case, "constant as input", REGISTRY.operators, Random(0)) is None


def make_suite(tmp_path, target, count=8):
    return Suite(REGISTRY, target, replace(PROFILES["quick"], graphs=count), tmp_path)


def test_graphs_plan_repeats_and_limits_task_size(tmp_path):
    """The plan is the same each time, and tasks have a limited size."""
    one = make_suite(tmp_path, Identity())
    (task,) = graphs.tasks(one)
    names = [c.name for c in graphs.checks(task, one)]
    assert names == [c.name for c in graphs.checks(task, one)]
    assert len(set(names)) == len(names)
    assert len([n for n in names if n.endswith("passes")]) == 8
    assert any(n.partition(", ")[2] in VARIANTS for n in names)
    assert len(graphs.tasks(make_suite(tmp_path, Identity(), 51))) == 3


def test_graphs_identity_passes_each_graph(tmp_path):
    """Eager itself passes every graph."""
    one = make_suite(tmp_path, Identity())
    for task in graphs.tasks(one):
        for check in graphs.checks(task, one):
            found = check.run()
            assert not found.verdict.is_failure, f"{check.name}: {found.comparison.message}"


def test_graphs_failure_reduced_to_failing_node(tmp_path):
    """A failing graph is reduced to the node that fails."""
    honest = make_suite(tmp_path, Identity())
    (task,) = graphs.tasks(honest)
    first = graphs.checks(task, honest)[0].run().case
    kind = max((n.op_type for n in first.graph.nodes), key=len)
    found = graphs.checks(task, make_suite(tmp_path, Negating(kind)))[0].run()
    assert found.verdict in (Verdict.VALUE, Verdict.SPECIAL)
    assert found.name == "graph-00, passes"
    assert [n.op_type for n in found.case.graph.nodes] == [kind]


def test_graphs_unsupported_operators_not_run(tmp_path):
    """A target that supports no operator passes and fails no graph."""
    one = make_suite(tmp_path, PartialTarget(known=()))
    (task,) = graphs.tasks(one)
    found = [check.run() for check in graphs.checks(task, one)]
    assert {o.verdict for o in found} == {Verdict.NOT_RUN}
    assert found[0].comparison.message == "the target rejects every call that was drawn for the graph"
