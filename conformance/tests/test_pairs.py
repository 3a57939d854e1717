"""Pairs: each pair of compatible operators is joined, and each case of a pack gets its own verdict."""

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
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from faulty_targets import FaultyTarget
from small_cases import make_suite_without_fault

from clika_ref.core.errors import TargetError
from clika_ref.core.invariants import verify
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Choice, Descriptions, IntegerRange, random_draw

REGISTRY = load_registry()
OPS = REGISTRY.operators


def make_pair_cases(first, *seconds):
    pairing = OperatorPairs(OPS[first], 0)
    return [case for second in seconds for case in pairing.make_cases(OPS[second], fork=True)]


def test_select_frequent_operators_returns_declared_list():
    """The frequent operators are declared and can be drawn."""
    assert [op.name for op in select_frequent_operators(REGISTRY, 50)] == list(FREQUENT_OPERATORS[:50])
    assert len(set(FREQUENT_OPERATORS)) == len(FREQUENT_OPERATORS)


def test_operator_pairs_make_chain_tap_and_fork():
    """A pair is a chain, a tapped chain, and both operators on one operand."""
    tapped, chain, forked = make_pair_cases("gelu", "softmax")
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
def test_operator_pairs_join_operators_with_fixed_shape(second):
    """Operators that need a shape are joined too."""
    assert f"relu->{second}" in [c.name for c in make_pair_cases("relu", second)]


def test_operator_pairs_impossible_chain_left_out():
    """A pair that cannot be joined is left out."""
    assert not [c for c in make_pair_cases("le", "gelu") if "->" in c.name]  # a bool is no float


def test_operator_pairs_other_seed_draws_other_call():
    """Another seed draws another second call."""
    texts = {
        str(next(iter(OperatorPairs(OPS["conv2d"], seed).make_cases(OPS["pad"], fork=False))).graph)
        for seed in range(4)
    }
    assert len(texts) > 1


TORCHVISION_OPERATORS = ("nms", "roi_align", "roi_pool", "ps_roi_align", "deform_conv2d")


def test_select_partners_foreign_operator_meets_frequent():
    """Operators of other plugins are paired with frequent operators in both orders."""
    foreign = select_foreign_operators(REGISTRY)
    assert {op.name for op in foreign} == {*TORCHVISION_OPERATORS, "squared_relu"}
    known = select_frequent_operators(REGISTRY, 50)
    assert select_partners(REGISTRY, foreign[0], 50) == [*known[:FOREIGN_PARTNER_COUNT], foreign[0]]
    assert select_partners(REGISTRY, known[0], 50) == [*known, *foreign]
    assert select_partners(REGISTRY, known[FOREIGN_PARTNER_COUNT], 50) == known


def test_pairs_checks_hold_each_fork_once(tmp_path):
    """The plan contains each unordered fork once."""
    small = replace(make_suite_without_fault(tmp_path), profile=replace(PROFILES["quick"], pair_operators=3))
    names = [c.name for t in pairs.tasks(small) for c in pairs.checks(t, small)]
    assert len([t.subject for t in pairs.tasks(small)]) == 4 + len(TORCHVISION_OPERATORS)  # and the foreign
    assert "linear, add" in names
    assert "add, linear" not in names
    assert {"linear->add", "add->linear", "add->linear, tapped", "squared_relu->linear", "linear->squared_relu"} <= {
        *names
    }


def test_repeatable_draw_adjusts_numbers_to_shape():
    """A drawn number is changed until the shape fits."""
    s = Descriptions()
    asked = []

    def redraw_size(description):
        asked.append(tuple(description.shape))
        changes = find_size_changes(description.shape, (7, 2, 4))
        if changes is not None:
            raise RedrawRequest(changes)

    steered = RepeatableDraw(random_draw(Random(0)), redraw_size)

    def sampler():
        shape = (steered(IntegerRange(1, 3)), 2, steered(Choice((3, 4))))
        steered(s.tensor(shape=shape))

    with pytest.raises(RedrawRequest) as again:
        sampler()
    steered.repeat(again.value.changes)
    with pytest.raises(RedrawRequest):
        sampler()
    assert asked[1] == (7, 2, 4)


def test_repeatable_draw_new_description_drawn_again():
    """A description that differs from the earlier one is drawn again."""
    steered = RepeatableDraw(random_draw(Random(0)), lambda _: None)
    first = [steered(IntegerRange(1, 3)), steered(Choice(("a", "b"))), steered(IntegerRange(5, 6))]
    steered.repeat({2: 9})
    assert [steered(IntegerRange(1, 3)), steered(Choice(("a", "b"))), steered(IntegerRange(5, 6))] == [*first[:2], 9]
    steered.repeat({2: 9})
    assert steered(IntegerRange(1, 3)) == first[0]
    assert steered(IntegerRange(7, 8)) in (7, 8)  # where the choice was
    assert steered(IntegerRange(5, 6)) in (5, 6)


def test_find_size_changes_computed_or_shared_size_fails():
    """Sizes that were computed or shared cannot be changed."""
    a, b = DrawnInt(2, 0), DrawnInt(3, 1)
    assert find_size_changes((a, b), (5, 6)) == {0: 5, 1: 6}
    assert find_size_changes((a, a), (5, 6)) is None
    assert find_size_changes((a * 2, b), (5, 6)) is None
    assert find_size_changes((a, 4), (5, 4)) == {0: 5}
    assert find_size_changes((4, 4), (4, 4)) is None


def test_to_plain_numbers_leaves_no_drawn_int():
    """Graphs contain no marked numbers."""
    assert type(to_plain_numbers((DrawnInt(2, 0),))[0]) is int
    for case in make_pair_cases("relu", "max_pool2d", "conv2d", "pad"):
        for node in case.graph.nodes:
            for item in node.attrs.values():
                assert all(not isinstance(i, DrawnInt) for i in (item if isinstance(item, tuple) else (item,)))


def test_merge_graphs_computes_each_graph():
    """Merged graphs compute the results of each graph."""
    cases = make_pair_cases("conv2d", "relu", "batch_norm", "add")
    whole = merge_graphs([c.graph for c in cases])
    verify(whole)
    inputs = [t for c in cases for t in c.runs[0].inputs]
    values = compute_eager_values(whole, inputs)
    expected = [t for c in cases for t in (compute_eager_values(c.graph, c.runs[0].inputs)[v] for v in c.graph.outputs)]
    for value, tensor in zip(whole.outputs, expected, strict=True):
        assert torch.equal(values[value].nan_to_num(), tensor.nan_to_num())


class Faulty:
    """Eager, which negates the results of softmax, or raises an error for graphs with a softmax."""

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
            raise TargetError("no softmax")
        return self.inner.compile(graph, path, **options)

    def load(self, artifact):
        runner, softmax = self.inner.load(artifact), self.softmax
        return lambda inputs: [-r if s else r for r, s in zip(runner(inputs), softmax, strict=True)]


def test_make_packed_checks_compile_once_and_pass(tmp_path):
    """A pack is compiled once, and all its cases pass."""
    target = Faulty()
    cases = make_pair_cases("gelu", "relu", "tanh", "mean")
    pack, *singles = make_packed_checks(cases, make_suite_without_fault(tmp_path, target))
    assert pack.run().verdict is Verdict.PASS
    assert {c.run().verdict for c in singles} == {Verdict.PASS}
    assert target.compiled == [2 * len(cases)]


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("writes", Verdict.CONTRACT), ("reuses", Verdict.CONTRACT), ("drifts", Verdict.NONDETERMINISTIC)],
)
def test_case_pack_contract_faults_checked_for_all(tmp_path, fault, verdict):
    """Writes, reused tensors and changing results of a pack are reported."""
    cases = [replace(case, runs=case.runs[:2]) for case in make_pair_cases("gelu", "tanh")]
    pack, *singles = make_packed_checks(cases, make_suite_without_fault(tmp_path, FaultyTarget(fault=fault)))
    pack.run()
    assert verdict in {c.run().verdict for c in singles}


def test_case_pack_chain_equal_to_tap_judged_once(tmp_path, monkeypatch):
    """A chain with the bits of its tapped form is not judged again."""
    judged = []
    honest = case_packs.judge_run

    def judge_run(reference, *rest):
        judged.append(reference.graph)
        return honest(reference, *rest)

    monkeypatch.setattr(case_packs, "judge_run", judge_run)
    cases = make_pair_cases("gelu", "tanh")
    for check in make_packed_checks(cases, make_suite_without_fault(tmp_path)):
        assert check.run().verdict is Verdict.PASS
    assert {id(graph) for graph in judged} == {id(c.graph) for c in cases if "->" not in c.name or "tapped" in c.name}


def test_case_pack_chain_different_from_tap_judged(tmp_path):
    """A chain whose bits differ from its tapped form is judged."""

    class TapOnly(Faulty):
        """Wrong where the first value is not returned too."""

        def load(self, artifact):
            runner = self.inner.load(artifact)

            def run(inputs):
                results = runner(inputs)
                return results if len(results) == 2 else [*results[:2], results[2] + 1, *results[3:]]

            return run

    pack = CasePack("pack", make_pair_cases("gelu", "tanh"), make_suite_without_fault(tmp_path, TapOnly()))
    pack.run()
    assert set(pack.found) == {"gelu->tanh, tapped", "gelu, tanh"}


@pytest.mark.parametrize(("raises", "verdict"), [(False, Verdict.VALUE), (True, Verdict.UNDECLARED)])
def test_case_pack_fault_costs_its_own_cases_only(tmp_path, raises, verdict):
    """A fault in a pack fails only the cases that contain it."""
    cases = make_pair_cases("gelu", "relu", "softmax", "mean")
    checks = make_packed_checks(cases, make_suite_without_fault(tmp_path, Faulty(raises=raises)))
    outcomes = {c.name: c.run().verdict for c in checks}
    assert {name for name, v in outcomes.items() if v.is_failure} == {
        "gelu->softmax",
        "gelu->softmax, tapped",
        "gelu, softmax",
    }
    assert outcomes["gelu->softmax"] is verdict


def test_make_packed_checks_pack_not_run_runs_case_alone(tmp_path):
    """A case whose pack was not run is run alone."""
    target = Faulty()
    _, second, *_ = make_packed_checks(
        make_pair_cases("gelu", "relu", "tanh"), make_suite_without_fault(tmp_path, target)
    )
    assert second.run().verdict is Verdict.PASS
    assert target.compiled[0] == 2


def test_case_pack_unsupported_case_left_out(tmp_path):
    """An unsupported case stays out of the pack."""

    class Refusing(Faulty):
        def unsupported_reason(self, node):
            return "no tanh" if node.op_type == "tanh" else None

    target = Refusing()
    pack, *singles = make_packed_checks(
        make_pair_cases("gelu", "relu", "tanh"), make_suite_without_fault(tmp_path, target)
    )
    pack.run()
    assert {c.name: c.run().verdict for c in singles}["gelu->tanh"] is Verdict.UNSUPPORTED
    assert target.compiled == [6]


def test_case_pack_nothing_proven_not_run(tmp_path):
    """A pack passes only if at least one case passes."""

    class Refusing(Faulty):
        def unsupported_reason(self, node):
            return "nothing yet"

    cases = make_pair_cases("softmax", "gelu")
    for target, message in (
        (Refusing(), "the target rejects all of its cases"),
        (FaultyTarget(fault="sevens"), "wrong results"),
    ):
        found = CasePack("pack", cases, make_suite_without_fault(tmp_path, target)).run()
        assert found.verdict is Verdict.NOT_RUN
        assert found.comparison.message.endswith(message)
    found = CasePack("pack", [], make_suite_without_fault(tmp_path)).run()
    assert (found.verdict, found.comparison.message) == (Verdict.NOT_RUN, "there are no cases to compile together")


def test_make_packed_checks_limit_pack_size(tmp_path):
    """A pack has a limited number of cases."""
    cases = make_pair_cases("gelu", "relu", "tanh", "mean", "add", "mul", "neg", "exp", "sum", "cat", "stack")
    checks = make_packed_checks(cases, make_suite_without_fault(tmp_path))
    assert [c.name for c in checks if c.name.startswith("pack")] == ["pack-0", "pack-1"]
    assert len(checks) == len(cases) + 2
    assert len(CasePack("pack", cases[:PACK_SIZE], make_suite_without_fault(tmp_path)).cases) == 25


def test_first_calls_rejected_by_eager_left_out():
    """First calls that eager rejects are left out."""
    starts = OperatorPairs(OPS["masked_select"], 0).first_calls  # of which the sizes of results depend on elements
    assert starts == []
    for seed, call in OperatorPairs(OPS["dropout"], 0).first_calls:
        assert (
            GraphGenerator(random_draw(Random(0)), dtypes=PAIR_DTYPES, seed=seed).take(OPS["dropout"], call) is not None
        )
