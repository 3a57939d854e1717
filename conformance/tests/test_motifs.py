"""Motifs and near misses show a pass what its own pattern and tables mention."""

from dataclasses import replace
from functools import cache

import torch
from clika_ref_cleanup.fold_batch_norm import RANKS
from clika_ref_cleanup.layouts import ON_LAST_SIDE
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.growing import Growth
from clika_ref_conformance.drawing.motifs.finding import cut, find_motifs
from clika_ref_conformance.drawing.motifs.rebuilding import Rebuilding
from clika_ref_conformance.drawing.motifs.varying import call_redrawn, random_instead

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
SEEDS = range(4)


@cache
def nodes_of(name):
    """Return every node of the motifs that are found for a pass; what chance leaves out of one seed, another has."""
    p, every = REGISTRY.passes[name], REGISTRY.operators
    found = [find_motifs(p, every, seed=seed, wanted=10, tries=4000, patience=400) for seed in SEEDS]
    return [node for motifs in found for c in (*motifs.cases, *motifs.varied, *motifs.listed) for node in c.graph.nodes]


def case_of(outputs_of, *tensors):
    graph = Graph("made")
    inputs = [graph.add_input(TensorType(t.dtype, tuple(t.shape)), f"x{i}") for i, t in enumerate(tensors)]
    for value in outputs_of(Builder(graph, REGISTRY.operators), *inputs):
        graph.add_output(value)
    return Case("made", graph, [Run("typical", tensors)])


def test_a_pass_is_tried_with_every_operator_of_a_small_table_that_it_mentions():
    nodes = nodes_of("fold-batch-norm")
    assert set(RANKS) <= {node.kind for node in nodes}
    assert any(node.kind.startswith("conv_transpose") and node.attrs["groups"] > 1 for node in nodes)


def test_each_table_of_a_pass_has_a_motif():
    assert ON_LAST_SIDE & {node.kind for node in nodes_of("push-transposes")}


def test_each_operator_of_a_rule_takes_the_number_that_is_neutral_to_it():
    taken = {(node.kind, v) for node in nodes_of("remove-identities") for v in node.inputs if type(v) in (int, float)}
    assert {("add", 0), ("sub", 0), ("mul", 1), ("div", 1), ("pow", 1)} <= taken


def test_an_attribute_comes_in_several_lengths():
    idle = {len(n.attrs["shifts"]) for n in nodes_of("remove-identities") if n.kind == "roll"}
    assert len(idle) > 1


def test_what_only_a_cut_node_read_is_returned_lest_it_be_dead():
    case = case_of(lambda build, x: [build("neg", build("exp", build("abs", x)))], torch.ones(3))
    small = cut(case, 1)
    assert {value.producer.kind for value in small.graph.outputs} == {"abs", "neg"}


def test_what_reads_what_it_read_in_the_motif_is_not_computed_again(monkeypatch):
    case = case_of(lambda build, x, y: [build("neg", build("exp", x)), build("abs", y)], torch.ones(3), torch.zeros(2))
    placed = []
    place = Growth.place
    monkeypatch.setattr(Growth, "place", lambda g, op, *rest: placed.append(op.name) or place(g, op, *rest))
    new = Rebuilding.of(case)
    new.take_leaves(lambda value, leaf: replace(leaf, tensor=leaf.tensor + 1) if value.name == "x0" else leaf)
    assert new.take_nodes()
    assert placed == ["exp", "neg"]
    outputs = [new.growth.tensors[new.now(v)] for v in case.graph.outputs]
    torch.testing.assert_close(outputs, [-torch.full((3,), 2.0).exp(), torch.zeros(2)])


def test_a_random_call_stands_where_a_certain_one_stood():
    case = case_of(lambda build, x: [build("neg", build("exp", x))], torch.ones(2, 3))
    made = [[node.is_random for node in made.graph.nodes] for made in random_instead(case, REGISTRY.operators) if made]
    assert {row.index(True) for row in made if True in row} == {0, 1}


def test_a_call_is_drawn_anew_on_what_it_read_and_what_follows_reads_it():
    def made(build, x):
        normal = build("layer_norm", build("exp", x), None, None, normalized_shape=(4,), eps=1e-5)
        return [build("neg", normal)]

    case = case_of(made, torch.ones(2, 3, 4))
    shapes = set()
    for other in call_redrawn(case, REGISTRY.operators):
        kinds = {node.kind: node for node in other.graph.nodes}
        assert kinds["layer_norm"].inputs[0] is kinds["exp"].output
        assert kinds["neg"].inputs[0] is kinds["layer_norm"].output
        shapes.add(kinds["layer_norm"].attrs["normalized_shape"])
    assert len(shapes) > 1
