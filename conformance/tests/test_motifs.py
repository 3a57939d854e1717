"""Motifs and near misses show a pass graphs from its own pattern and tables."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from clika_ref_cleanup.fold_batch_norm import FOLDABLE_RANKS
from clika_ref_cleanup.layouts import LAST_DIM_OPERATORS
from clika_ref_cleanup.mul_to_silu import mul_to_silu
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder
from clika_ref_conformance.drawing.motifs import motif_search
from clika_ref_conformance.drawing.motifs.cutting import cut_case, shrink_motif
from clika_ref_conformance.drawing.motifs.motif_search import MotifGoal, find_motifs
from clika_ref_conformance.drawing.motifs.optional_operands import change_optional_operands
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder
from clika_ref_conformance.drawing.motifs.varying import redraw_call, substitute_random_operators

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.rewriter import apply_rules
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
SEEDS = range(4)


@cache
def find_motif_nodes(name, *seeds):
    """Return the nodes of all motifs of a pass, for several seeds together."""
    p, every = REGISTRY.passes[name], REGISTRY.operators
    found = [find_motifs(p, every, seed=seed, motif_count=10, tries=4000, patience=400) for seed in seeds or SEEDS]
    return [node for motifs in found for c in (*motifs.cases, *motifs.varied, *motifs.listed) for node in c.graph.nodes]


def make_case_of(outputs_of, *tensors):
    graph = Graph("made")
    inputs = [graph.add_input(TensorType(t.dtype, tuple(t.shape)), f"x{i}") for i, t in enumerate(tensors)]
    for value in outputs_of(Builder(graph, REGISTRY.operators), *inputs):
        graph.add_output(value)
    return GraphCase("made", graph, [CaseRun("typical", tensors)])


@pytest.mark.slow
def test_find_motifs_covers_each_operator_of_small_table():
    """A pass is tried with each operator of a small table that it mentions."""
    nodes = find_motif_nodes("fold-batch-norm")
    assert set(FOLDABLE_RANKS) <= {node.op_type for node in nodes}
    assert any(node.op_type.startswith("conv_transpose") and node.attrs["groups"] > 1 for node in nodes)


@pytest.mark.slow
def test_find_motifs_covers_each_table_of_pass():
    """Each table of a pass has a motif."""
    assert LAST_DIM_OPERATORS & {node.op_type for node in find_motif_nodes("push-transposes")}


@pytest.mark.slow_cases("1", "2", "3")
@pytest.mark.parametrize("seed", SEEDS)
def test_find_motifs_rule_operators_occur_as_removable(seed):
    """Each operator of a rule occurs as a node that the rule removes."""
    nodes = find_motif_nodes("remove-identities", seed)
    taken = {(node.op_type, v) for node in nodes for v in node.inputs if type(v) in (int, float)}
    assert {("add", 0), ("sub", 0), ("mul", 1), ("div", 1), ("pow", 1)} <= taken


def test_cut_case_dropped_output_drops_its_nodes():
    """Dropping an output drops the nodes that only it reads."""
    case = make_case_of(lambda build, x: [build("neg", build("exp", x)), build("abs", x)], torch.ones(3))
    assert [[n.op_type for n in cut_case(case, None, drop=i).graph.nodes] for i in range(2)] == [
        ["abs"],
        ["exp", "neg"],
    ]
    small = shrink_motif(case, lambda c: any(n.op_type == "exp" for n in c.graph.nodes))
    assert [value.producer.op_type for value in small.graph.outputs] == ["exp"]


@pytest.mark.slow
def test_find_motifs_replaced_nodes_have_uses():
    """A node that a pass replaces has uses, except where no output was drawn."""
    nodes = find_motif_nodes("remove-identities")
    assert sum(any(v.uses for v in node.outputs) for node in nodes) > 0.95 * len(nodes)


def test_case_rebuilder_unread_lists_tensor_without_uses():
    """A tensor without remaining uses is returned."""
    case = make_case_of(lambda build, x: [build("neg", build("exp", x))], torch.ones(3))
    new = CaseRebuilder.of(case)
    new.add_leaves()
    exp, neg = case.graph.nodes
    assert new.take(exp)
    assert new.take(neg, [case.graph.inputs[0]])
    assert new.unread == [new.map_operand(exp.output)]


@pytest.mark.slow
def test_find_motifs_attribute_has_several_lengths():
    """An attribute occurs in several lengths."""
    nodes = find_motif_nodes("remove-identities", *range(8))  # a roll along several dims that moves nothing is rare
    idle = {len(n.attrs["shifts"]) for n in nodes if n.op_type == "roll"}
    assert len(idle) > 1


def test_cut_case_operand_of_cut_node_becomes_output():
    """A tensor that only a dropped node read becomes an output."""
    case = make_case_of(lambda build, x: [build("neg", build("exp", build("abs", x)))], torch.ones(3))
    small = cut_case(case, 1)
    assert {value.producer.op_type for value in small.graph.outputs} == {"abs", "neg"}


def test_case_rebuilder_unchanged_inputs_not_recomputed(monkeypatch):
    """A node whose inputs are unchanged is not computed again."""
    case = make_case_of(
        lambda build, x, y: [build("neg", build("exp", x)), build("abs", y)], torch.ones(3), torch.zeros(2)
    )
    placed = []
    add = EagerGraphBuilder.add_call
    monkeypatch.setattr(EagerGraphBuilder, "add_call", lambda g, op, *rest: placed.append(op.name) or add(g, op, *rest))
    new = CaseRebuilder.of(case)
    new.add_leaves(lambda value, leaf: replace(leaf, tensor=leaf.tensor + 1) if value.name == "x0" else leaf)
    assert new.add_nodes()
    assert placed == ["exp", "neg"]
    outputs = [new.builder.tensors[new.map_operand(v)] for v in case.graph.outputs]
    torch.testing.assert_close(outputs, [-torch.full((3,), 2.0).exp(), torch.zeros(2)])


def test_substitute_random_operators_replaces_each_call():
    """A random call replaces each deterministic one."""
    case = make_case_of(lambda build, x: [build("neg", build("exp", x))], torch.ones(2, 3))
    made = [
        [node.is_random for node in made.graph.nodes]
        for made in substitute_random_operators(case, REGISTRY.operators)
        if made
    ]
    assert {row.index(True) for row in made if True in row} == {0, 1}


def test_redraw_call_keeps_operand_and_users():
    """A redrawn call reads the same operand, and its users read the new call."""

    def build_outputs(build, x):
        normal = build("layer_norm", build("exp", x), None, None, normalized_shape=(4,), eps=1e-5)
        return [build("neg", normal)]

    case = make_case_of(build_outputs, torch.ones(2, 3, 4))
    shapes = set()
    for other in redraw_call(case, REGISTRY.operators):
        kinds = {node.op_type: node for node in other.graph.nodes}
        assert kinds["layer_norm"].inputs[0] is kinds["exp"].output
        assert kinds["neg"].inputs[0] is kinds["layer_norm"].output
        shapes.add(kinds["layer_norm"].attrs["normalized_shape"])
    assert len(shapes) > 1


def test_change_optional_operands_adds_and_removes():
    """An optional operand is left out if given, and given if absent."""

    def build_outputs(build, x, weight, bias):
        return [build("linear", x, weight, bias), build("linear", x, weight, None)]

    case = make_case_of(build_outputs, torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
    found = [made for made in change_optional_operands(case, REGISTRY.operators) if made]
    kinds = [[node.inputs[2] is not None for node in made.graph.nodes if node.op_type == "linear"] for made in found]
    assert kinds == [[False, False], [True, True]]
    assert found[1].graph.constants["given"].type.shape == (4,)


def test_find_motifs_goal_reached_by_other_not_unreached(monkeypatch):
    """A goal that the motif of another goal reaches is not reported as unreached."""
    begun = []
    late = MotifGoal("late", lambda _: bool(begun), ())
    easy = MotifGoal("easy", lambda _: begun.append(True) or True, ())
    monkeypatch.setattr(motif_search, "make_goals", lambda *_: [late, easy])
    p = REGISTRY.passes["remove-identities"]
    found = find_motifs(p, REGISTRY.operators, seed=0, motif_count=1, tries=3, patience=3)
    assert found.cases
    assert found.unreached_goals == []


@pytest.mark.parametrize("seed", SEEDS)
def test_draw_chain_rejoining_paths_found(seed):
    """Paths that join again occur as motifs."""
    goal = MotifGoal(
        "rule", lambda graph: apply_rules(graph, [mul_to_silu], REGISTRY.operators) > 0, ("mul",), [("sigmoid",)]
    )
    random = Random(seed)
    chains = (motif_search.draw_chain(random, REGISTRY.operators, goal, i, forgets=False) for i in range(2000))
    assert sum(case is not None and goal.fires(case.graph) for case in chains) > 15


def test_redraw_call_siblings_may_keep_shared_tensor():
    """Siblings that read one tensor may still do so after a redraw."""

    def build_outputs(build, x, one, other):
        return [build("linear", x, one, None), build("linear", x, other, None)]

    case = make_case_of(build_outputs, torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3))
    found = [
        [node for node in made.graph.nodes if node.op_type == "linear"] for made in redraw_call(case, {}, draws=20)
    ]
    assert {first.inputs[0] is second.inputs[0] for first, second in found} == {True, False}
