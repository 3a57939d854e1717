"""Pairs: every two operators that can be joined are, and a pack gives each of its cases a verdict of its own."""

from dataclasses import replace
from random import Random

import pytest
import torch
from clika_ref_conformance.drawing.eager_values import compute_eager_values
from clika_ref_conformance.drawing.graphs.frequent_operators import (
    FOREIGN_PARTNER_COUNT,
    FREQUENT_OPERATORS,
    select_foreign_operators,
    select_frequent_operators,
    select_partners,
)
from clika_ref_conformance.drawing.graphs.graph_generator import GraphGenerator
from clika_ref_conformance.drawing.graphs.pairs import PAIR_DTYPES, OperatorPairs
from clika_ref_conformance.drawing.graphs.size_steering import (
    DrawnInt,
    RedrawRequest,
    RepeatableDraw,
    find_size_changes,
    to_plain_numbers,
)
from clika_ref_conformance.execution import case_packs
from clika_ref_conformance.execution.case_packs import PACK_SIZE, CasePack, make_packed_checks, merge_graphs
from clika_ref_conformance.levels import pairs
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from odd_targets import Odd

from clika_ref.core.errors import TargetError
from clika_ref.core.invariants import verify
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Choice, Descriptions, IntegerRange, random_draw

REGISTRY = load_registry()
OPS = REGISTRY.operators


def suite(tmp_path, target=None):
    return Suite(REGISTRY, target or Identity(), PROFILES["quick"], tmp_path)


def cases_of(first, *seconds):
    pairing = OperatorPairs(OPS[first], 0)
    return [case for second in seconds for case in pairing.cases(OPS[second], fork=True)]


def test_the_operators_in_demand_are_declared_and_can_be_drawn():
    assert [op.name for op in select_frequent_operators(REGISTRY, 50)] == list(FREQUENT_OPERATORS[:50])
    assert len(set(FREQUENT_OPERATORS)) == len(FREQUENT_OPERATORS)


def test_a_pair_is_a_chain_a_tapped_chain_and_both_on_one_operand():
    tapped, chain, forked = cases_of("gelu", "softmax")
    assert [c.name for c in (chain, tapped, forked)] == ["gelu->softmax", "gelu->softmax, tapped", "gelu, softmax"]
    for case in (chain, tapped, forked):
        verify(case.graph)
        assert [n.op_type for n in case.graph.nodes] == ["gelu", "softmax"]
        for run in case.runs:
            compute_eager_values(case.graph, run.inputs)
    one, two = chain.graph.nodes
    assert two.inputs[0] is one.output
    assert chain.graph.outputs == [two.output]
    one, two = tapped.graph.nodes
    assert tapped.graph.outputs == [two.output, one.output]
    one, two = forked.graph.nodes
    assert one.inputs[0] is two.inputs[0]
    assert forked.graph.outputs == [one.output, two.output]


@pytest.mark.parametrize(
    "second", ["max_pool2d", "conv2d", "batch_norm", "scaled_dot_product_attention", "upsample_bilinear2d"]
)
def test_operators_that_ask_for_a_shape_are_joined_too(second):
    assert f"relu->{second}" in [c.name for c in cases_of("relu", second)]


def test_a_pair_that_cannot_be_is_left_out():
    assert not [c for c in cases_of("le", "gelu") if "->" in c.name]  # a bool is no float


def test_the_second_call_of_a_pair_is_drawn_anew_for_another_seed():
    texts = {
        str(next(iter(OperatorPairs(OPS["conv2d"], seed).cases(OPS["pad"], fork=False))).graph) for seed in range(4)
    }
    assert len(texts) > 1


def test_the_operators_of_other_plugins_meet_their_neighbours_on_both_sides():
    (stranger,) = select_foreign_operators(REGISTRY)
    known = select_frequent_operators(REGISTRY, 50)
    assert select_partners(REGISTRY, stranger, 50) == [*known[:FOREIGN_PARTNER_COUNT], stranger]
    assert select_partners(REGISTRY, known[0], 50) == [*known, stranger]
    assert select_partners(REGISTRY, known[FOREIGN_PARTNER_COUNT], 50) == known


def test_the_plan_holds_each_unordered_couple_once_side_by_side(tmp_path):
    small = replace(suite(tmp_path), profile=replace(PROFILES["quick"], pair_operators=3))
    names = [c.name for t in pairs.tasks(small) for c in pairs.checks(t, small)]
    assert len([t.subject for t in pairs.tasks(small)]) == 4  # and the stranger
    assert "linear, add" in names
    assert "add, linear" not in names
    assert {"linear->add", "add->linear", "add->linear, tapped", "squared_relu->linear", "linear->squared_relu"} <= {
        *names
    }


def test_a_number_that_was_drawn_is_changed_until_the_shape_fits():
    s = Descriptions()
    asked = []

    def answer(description):
        asked.append(tuple(description.shape))
        changes = find_size_changes(description.shape, (7, 2, 4))
        if changes is not None:
            raise RedrawRequest(changes)

    steered = RepeatableDraw(random_draw(Random(0)), answer)

    def sampler():
        shape = (steered(IntegerRange(1, 3)), 2, steered(Choice((3, 4))))
        steered(s.tensor(shape=shape))

    with pytest.raises(RedrawRequest) as again:
        sampler()
    steered.repeat(again.value.changes)
    with pytest.raises(RedrawRequest):
        sampler()
    assert asked[1] == (7, 2, 4)


def test_a_question_that_was_not_asked_before_is_decided_anew():
    steered = RepeatableDraw(random_draw(Random(0)), lambda _: None)
    first = [steered(IntegerRange(1, 3)), steered(Choice(("a", "b"))), steered(IntegerRange(5, 6))]
    steered.repeat({2: 9})
    assert [steered(IntegerRange(1, 3)), steered(Choice(("a", "b"))), steered(IntegerRange(5, 6))] == [*first[:2], 9]
    steered.repeat({2: 9})
    assert steered(IntegerRange(1, 3)) == first[0]
    assert steered(IntegerRange(7, 8)) in (7, 8)  # where the choice was
    assert steered(IntegerRange(5, 6)) in (5, 6)


def test_lengths_that_were_calculated_or_shared_cannot_be_steered():
    a, b = DrawnInt(2, 0), DrawnInt(3, 1)
    assert find_size_changes((a, b), (5, 6)) == {0: 5, 1: 6}
    assert find_size_changes((a, a), (5, 6)) is None
    assert find_size_changes((a * 2, b), (5, 6)) is None
    assert find_size_changes((a, 4), (5, 4)) == {0: 5}
    assert find_size_changes((4, 4), (4, 4)) is None


def test_what_is_drawn_leaves_no_marks_in_the_graph():
    assert type(to_plain_numbers((DrawnInt(2, 0),))[0]) is int
    for case in cases_of("relu", "max_pool2d", "conv2d", "pad"):
        for node in case.graph.nodes:
            for item in node.attrs.values():
                assert all(not isinstance(i, DrawnInt) for i in (item if isinstance(item, tuple) else (item,)))


def test_merged_graphs_compute_what_each_computes():
    cases = cases_of("conv2d", "relu", "batch_norm", "add")
    whole = merge_graphs([c.graph for c in cases])
    verify(whole)
    inputs = [t for c in cases for t in c.runs[0].inputs]
    values = compute_eager_values(whole, inputs)
    expected = [t for c in cases for t in (compute_eager_values(c.graph, c.runs[0].inputs)[v] for v in c.graph.outputs)]
    for value, tensor in zip(whole.outputs, expected, strict=True):
        assert torch.equal(values[value].nan_to_num(), tensor.nan_to_num())


class Faulty:
    """Eager, which negates the results of softmax, or raises on what holds one."""

    def __init__(self, *, raises=False):
        self.inner = Identity()
        self.raises = raises
        self.compiled = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def compile(self, graph, path, **options):
        self.compiled.append(len(graph))
        self.softmax = [v.producer is not None and v.producer.op_type == "softmax" for v in graph.outputs]
        if self.raises and any(n.op_type == "softmax" for n in graph.nodes):
            msg = "no softmax"
            raise TargetError(msg)
        return self.inner.compile(graph, path, **options)

    def load(self, artifact):
        runner, softmax = self.inner.load(artifact), self.softmax
        return lambda inputs: [-r if s else r for r, s in zip(runner(inputs), softmax, strict=True)]


def test_a_pack_is_compiled_once_and_all_of_it_passes(tmp_path):
    target = Faulty()
    cases = cases_of("gelu", "relu", "tanh", "mean")
    pack, *singles = make_packed_checks(cases, suite(tmp_path, target))
    assert pack.run().verdict is Verdict.PASS
    assert {c.run().verdict for c in singles} == {Verdict.PASS}
    assert target.compiled == [2 * len(cases)]


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("writes", Verdict.CONTRACT), ("reuses", Verdict.CONTRACT), ("drifts", Verdict.NONDETERMINISTIC)],
)
def test_what_a_pack_does_besides_its_results_is_checked_for_all_of_it(tmp_path, fault, verdict):
    cases = [replace(case, runs=case.runs[:2]) for case in cases_of("gelu", "tanh")]
    pack, *singles = make_packed_checks(cases, suite(tmp_path, Odd(fault=fault)))
    pack.run()
    assert verdict in {c.run().verdict for c in singles}


def test_a_chain_that_returns_the_bits_of_the_tapped_one_is_not_judged_again(tmp_path, monkeypatch):
    judged = []
    honest = case_packs.judge_run

    def judge_run(reference, *rest):
        judged.append(reference.graph)
        return honest(reference, *rest)

    monkeypatch.setattr(case_packs, "judge_run", judge_run)
    cases = cases_of("gelu", "tanh")
    for check in make_packed_checks(cases, suite(tmp_path)):
        assert check.run().verdict is Verdict.PASS
    assert {id(graph) for graph in judged} == {id(c.graph) for c in cases if "->" not in c.name or "tapped" in c.name}


def test_a_chain_whose_bits_are_others_is_judged(tmp_path):
    class TapOnly(Faulty):
        """Wrong where the first value is not returned too."""

        def load(self, artifact):
            runner = self.inner.load(artifact)

            def run(inputs):
                results = runner(inputs)
                return results if len(results) == 2 else [*results[:2], results[2] + 1, *results[3:]]

            return run

    pack = CasePack("pack", cases_of("gelu", "tanh"), suite(tmp_path, TapOnly()))
    pack.run()
    assert set(pack.found) == {"gelu->tanh, tapped", "gelu, tanh"}


@pytest.mark.parametrize(("raises", "verdict"), [(False, Verdict.VALUE), (True, Verdict.UNDECLARED)])
def test_a_fault_in_a_pack_costs_only_the_case_that_has_it(tmp_path, raises, verdict):
    cases = cases_of("gelu", "relu", "softmax", "mean")
    checks = make_packed_checks(cases, suite(tmp_path, Faulty(raises=raises)))
    outcomes = {c.name: c.run().verdict for c in checks}
    assert {name for name, v in outcomes.items() if v.is_failure} == {
        "gelu->softmax",
        "gelu->softmax, tapped",
        "gelu, softmax",
    }
    assert outcomes["gelu->softmax"] is verdict


def test_a_case_whose_pack_was_never_run_is_run_by_itself(tmp_path):
    target = Faulty()
    _, second, *_ = make_packed_checks(cases_of("gelu", "relu", "tanh"), suite(tmp_path, target))
    assert second.run().verdict is Verdict.PASS
    assert target.compiled[0] == 2


def test_a_refused_case_stays_out_of_the_pack(tmp_path):
    class Refusing(Faulty):
        def unsupported_reason(self, node):
            return "no tanh" if node.op_type == "tanh" else None

    target = Refusing()
    pack, *singles = make_packed_checks(cases_of("gelu", "relu", "tanh"), suite(tmp_path, target))
    pack.run()
    assert {c.name: c.run().verdict for c in singles}["gelu->tanh"] is Verdict.UNSUPPORTED
    assert target.compiled == [6]


def test_a_pack_passes_only_where_it_shows_something_to_be_right(tmp_path):
    class Refusing(Faulty):
        def unsupported_reason(self, node):
            return "nothing yet"

    cases = cases_of("softmax", "gelu")
    for target, message in ((Refusing(), "the target refuses all of it"), (Odd(fault="sevens"), "judged wrong")):
        found = CasePack("pack", cases, suite(tmp_path, target)).run()
        assert found.verdict is Verdict.NOT_RUN
        assert found.comparison.message.endswith(message)
    found = CasePack("pack", [], suite(tmp_path)).run()
    assert (found.verdict, found.comparison.message) == (Verdict.NOT_RUN, "there is nothing to compile together")


def test_packs_hold_a_bounded_number_of_cases(tmp_path):
    cases = cases_of("gelu", "relu", "tanh", "mean", "add", "mul", "neg", "exp", "sum", "cat", "stack")
    checks = make_packed_checks(cases, suite(tmp_path))
    assert [c.name for c in checks if c.name.startswith("pack")] == ["pack-0", "pack-1"]
    assert len(checks) == len(cases) + 2
    assert len(CasePack("pack", cases[:PACK_SIZE], suite(tmp_path)).cases) == 25


def test_a_start_that_eager_refuses_is_no_start():
    starts = OperatorPairs(OPS["masked_select"], 0).first_calls  # of which the sizes of results depend on elements
    assert starts == []
    for seed, call in OperatorPairs(OPS["dropout"], 0).first_calls:
        assert (
            GraphGenerator(random_draw(Random(0)), dtypes=PAIR_DTYPES, seed=seed).take(OPS["dropout"], call) is not None
        )
