"""L2 finds faulty passes, and reports no failure of correct ones."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broken_passes import BROKEN, WALK_A_SET, Broken
from clika_ref_conformance.cases import CaseRun, GraphCase, Task
from clika_ref_conformance.drawing.motifs.motif_search import MotifGoal, _is_reached, build_pass_motifs
from clika_ref_conformance.drawing.motifs.near_misses import enlarge_constants
from clika_ref_conformance.execution.check_runner import run_check
from clika_ref_conformance.judging.pass_rules import check_passes, find_copies
from clika_ref_conformance.judging.random_nodes import count_random_nodes
from clika_ref_conformance.levels import passes
from clika_ref_conformance.levels.hash_seeds import digest_in_other_process, digest_text, run_on_random_graphs
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Verdict

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
SMALL = replace(PROFILES["quick"], pass_graphs=60)


def make_suite(*chosen, profile=SMALL):
    registry = replace(REGISTRY, passes={p.name: p for p in chosen} or REGISTRY.passes)
    return Suite(registry, REGISTRY.targets["interpreter"], profile, Path("unused"))


def run_failing_checks(p, names=()):
    """Run the checks of a pass; return the failures."""
    found = [run_check(check) for check in passes.checks(Task("passes", p.name), make_suite(p))]
    return [o for o in found if o.verdict.is_failure and (not names or o.name in names)]


EXPECTED = {
    "merge-random": Verdict.CONTRACT,
    "drop-output-name": Verdict.CONTRACT,
    "drop-in-training": Verdict.CONTRACT,
    "scale-in-place": Verdict.CONTRACT,
    "turn-operands": Verdict.CONTRACT,
    "forget-parameters": Verdict.CONTRACT,
    "copy-weights": Verdict.CONTRACT,
    "edit-attributes": Verdict.CONTRACT,
    "raise-on-two-readers": Verdict.CONTRACT,
    "never-fires": Verdict.CONTRACT,
}
"""The verdict for each broken pass; a wrong value if it is not listed."""


@pytest.mark.slow_cases(
    "merge-random",
    "fold-into-shared-layer",
    "cancel-any-permutes",
    "merge-by-operands",
    "fold-overwritten",
    "merge-any-casts",
)
@pytest.mark.parametrize("p", BROKEN, ids=lambda p: p.name)
def test_passes_broken_pass_found(p):
    """A broken pass is found."""
    found = run_failing_checks(p)
    assert EXPECTED.get(p.name, Verdict.VALUE) in {o.verdict for o in found}, [o.name for o in found]


@pytest.mark.slow
@pytest.mark.parametrize("p", REGISTRY.passes.values(), ids=lambda p: p.name)
def test_passes_installed_pass_breaks_no_rule(p):
    """The installed passes break no rule."""
    assert [(o.name, o.comparison.message) for o in run_failing_checks(p)] == []


def test_passes_tasks_list_passes_and_hash_seeds():
    """Each pass is a task, and so are the hash seeds."""
    assert {t.subject for t in passes.tasks(make_suite())} == {*REGISTRY.passes, "hash seeds"}


def test_passes_checks_planned_without_drawing(monkeypatch):
    """The checks are known before a graph is drawn."""
    monkeypatch.setattr(passes, "find_motifs", lambda *_, **__: pytest.fail("drawn while planning"))
    names = [check.name for check in passes.checks(Task("passes", "merge-chains"), make_suite())]
    assert len(names) == len(set(names)) > len({**passes.CALL_CHANGES, **passes.SURROUNDING_CHANGES})


def test_passes_never_firing_pass_message_suggests_motifs():
    """A pass that never fires is reported with a hint to `motifs`."""
    (failure,) = run_failing_checks(next(p for p in BROKEN if p.name == "never-fires"), ["fires"])
    assert "pass and rule match-nothing fired on none of" in failure.comparison.message
    assert "declare `motifs`" in failure.comparison.message


def test_passes_failure_reduced_with_graphs_before_after():
    """A failing graph is small, with the graph before and after the pass."""
    outcome, *_ = run_failing_checks(next(p for p in BROKEN if p.name == "merge-by-operands"))
    assert outcome.case is not None
    assert len(outcome.case.graph) <= 4
    assert "before:\ngraph" in outcome.comparison.message
    assert "after:\ngraph" in outcome.comparison.message


def test_check_hash_seeds_set_order_found(monkeypatch):
    """A dependence on the order of a set is found in another process."""
    suite = make_suite(WALK_A_SET)
    here = run_on_random_graphs(WALK_A_SET, REGISTRY.operators, 0)
    assert any("relu_of" in text for text in here)
    names = {**REGISTRY.passes, WALK_A_SET.name: WALK_A_SET}
    suite = replace(suite, registry=replace(REGISTRY, passes=names))
    elsewhere = {WALK_A_SET.name: [digest_text(text.replace("relu_of_", "relu_of_1")) for text in here]}
    monkeypatch.setattr(passes, "digest_in_other_process", lambda *_: elsewhere)
    outcome = passes.check_hash_seeds(suite)
    assert outcome.verdict is Verdict.NONDETERMINISTIC
    assert "walk-a-set: the result differs under another PYTHONHASHSEED" in outcome.comparison.message


@pytest.mark.slow
def test_digest_in_other_process_installed_passes_agree():
    """Installed passes make the same graphs under another hash seed."""
    names = ["drop-relu", "remove-dropout"]
    here = {n: [digest_text(t) for t in run_on_random_graphs(REGISTRY.passes[n], REGISTRY.operators, 0)] for n in names}
    assert digest_in_other_process(names, 0) == here
    assert all(here.values())


@pytest.mark.slow
def test_digest_in_other_process_error_quoted():
    """The error of the other process is quoted."""
    with pytest.raises(ClikaError, match=r"(?s)PYTHONHASHSEED=4242 failed:.*invalid literal for int"):
        digest_in_other_process(["drop-relu"], "no number")  # pyright: ignore[reportArgumentType]


def test_run_on_random_graphs_independent_of_earlier_draws():
    """Draws do not depend on earlier draws."""
    first = run_on_random_graphs(REGISTRY.passes["remove-dropout"], REGISTRY.operators, 5)
    run_on_random_graphs(REGISTRY.passes["fold-literals"], REGISTRY.operators, 5)
    assert run_on_random_graphs(REGISTRY.passes["remove-dropout"], REGISTRY.operators, 5) == first


def test_build_pass_motifs_uses_own_motif():
    """A pass may provide a motif that no draw finds."""

    def build_three_negations(build):
        x = build.graph.add_input(TensorType(torch.float32, (7,)), "x")
        return build("neg", build("neg", build("neg", x)))

    class WithMotif(Broken):
        motifs = (build_three_negations,)

    (case,) = build_pass_motifs(WithMotif(lambda *_: None, "with-motif"), REGISTRY.operators)
    assert [node.op_type for node in case.graph.nodes] == ["neg"] * 3
    assert [t.shape for t in case.runs[0].inputs] == [(7,)]


def test_count_random_nodes_ignores_random_operand():
    """A node counts as random for any random operand."""
    graph = Graph("dropouts")
    x = graph.add_input(TensorType(torch.float32, ()), "x")
    build = Builder(graph, REGISTRY.operators)
    often = build("dropout", x, p=0.9, train=True)
    graph.add_output(build("dropout", often, p=0.5, train=True))
    case = GraphCase("often", graph, [CaseRun("some", (torch.tensor(1.5),))])
    counted = []
    for seed in range(8):
        torch.manual_seed(seed)
        counted.append(count_random_nodes(case.graph, case.runs[0].inputs))
    assert counted == [(2, 2)] * 8


def test_count_random_nodes_type_only_reader_not_random():
    """A random node makes no result random if only its type is read."""
    graph = Graph("typed")
    x = graph.add_input(TensorType(torch.float32, (3,)), "x")
    build = Builder(graph, REGISTRY.operators)
    noise, base = (build("log_normal", x, mean=1.0, std=std) for std in (1.0, 2.0))
    graph.add_output(build("overwritten", noise, base))
    assert count_random_nodes(graph, [torch.ones(3)]) == (2, 1)
    graph.add_output(build("relu", base))
    assert count_random_nodes(graph, [torch.ones(3)]) == (2, 2)


def test_check_pass_random_quotient_by_itself_passes():
    """The quotient of a random tensor by itself is not random in any form."""
    graph = Graph("ones")
    x = graph.add_input(TensorType(torch.float32, (3,)), "x")
    build = Builder(graph, REGISTRY.operators)
    noise, other = (build("exponential", x, lambd=1.0) for _ in range(2))
    graph.add_output(build("div", build("overwritten", noise, noise), noise))
    graph.add_output(other)
    case = GraphCase("ones", graph, [CaseRun("some", (torch.ones(3),))])
    found = check_passes([REGISTRY.passes["remove-detach"]], REGISTRY.operators, case)
    assert found.comparison.verdict is Verdict.PASS, found.comparison.message
    assert found.fired


def test_check_pass_equal_attribute_write_found():
    """An attribute overwritten by an equal one is reported: lowerings distinguish True from 1."""
    graph = Graph("made")
    x = graph.add_input(TensorType(torch.float32, (2, 3)), "x")
    graph.add_output(Builder(graph, REGISTRY.operators)("dropout", x, p=0.5, train=False))

    def write(graph, _):
        for node in graph.nodes:
            node.attrs["train"] = 0

    found = check_passes(
        [Broken(write, "write")], REGISTRY.operators, GraphCase("c", graph, [CaseRun("r", (torch.ones(2, 3),))])
    )
    assert found.comparison.verdict is Verdict.CONTRACT
    assert "changed a node in place" in found.comparison.message


@pytest.mark.parametrize("late", [False, True])
def test_check_pass_weight_write_found_and_restored(late):
    """A weight that is overwritten is reported and restored, because clones share weights."""
    graph = Graph("made")
    x = graph.add_input(TensorType(torch.float32, (2,)), "x")
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    graph.add_output(Builder(graph, REGISTRY.operators)("add", x, graph.add_constant(weight, "w")))

    def double(graph, _):
        w = graph.constants["w"]
        doubled = lambda: w.data.detach().mul_(2)  # noqa: E731
        if w.uses:
            graph.replace(w, graph.add_constant(doubled if late else doubled(), "w_1", w.type))

    found = check_passes(
        [Broken(double, "double")], REGISTRY.operators, GraphCase("c", graph, [CaseRun("r", (torch.ones(2),))])
    )
    assert "the pass changed the constants ['w'] in place" in found.comparison.message
    assert weight.tolist() == [1.0, 2.0]


def test_enlarge_constants_scales_inputs_down():
    """A constant is almost too large, and the inputs are small."""
    graph = Graph("g")
    x = graph.add_input(TensorType(torch.float32, (2,)), "x")
    w, b = (graph.add_constant(torch.nn.Parameter(torch.tensor([1.0, n])), name) for n, name in ((2, "w"), (-4, "b")))
    build = Builder(graph, REGISTRY.operators)
    graph.add_output(build("add", build("mul", x, w), b))
    case = GraphCase("case", graph, [CaseRun("ones", (torch.ones(2),))])
    found = list(enlarge_constants(case, REGISTRY.operators))
    assert [c.name for c in found] == ["%w is large"]  # what is added to other results could overflow with them
    data = {n: v.data.abs().max().item() for n, v in found[0].graph.constants.items()}
    assert data["w"] == pytest.approx(0.9 * torch.finfo(torch.float32).max)
    assert data["b"] == 4
    assert 0 < found[0].runs[0].inputs[0].max() < 1e-9


@pytest.mark.slow
def test_is_reached_memory_error_frees_graph():
    """The memory of a pass that ran out of memory is free again."""
    seen = []

    def make_cycle_and_run_out_of_memory(graph):
        graph.itself = graph
        seen.append(weakref.ref(graph))
        raise MemoryError

    graph = Graph("g")
    graph.add_output(graph.add_input(TensorType(torch.float32, (2,)), "x"))
    assert _is_reached(
        MotifGoal("any", make_cycle_and_run_out_of_memory, ()),
        GraphCase("one", graph, [CaseRun("ones", (torch.ones(2),))]),
    )
    assert seen[0]() is None


@pytest.mark.parametrize("read_from", ["weight", "copy", "both", "two copies"])
def test_find_copies_one_copy_may_replace_weight(read_from):
    """One copy may replace a shared weight at the end; two may not."""
    g = Graph("shared")
    weight, build = g.add_constant(torch.ones(3), "weight"), Builder(g, REGISTRY.operators)
    for number in range(2):
        build("add", g.add_input(TensorType(torch.float32, (3,)), f"x{number}"), weight)
    after = g.clone()
    for position, node in enumerate(n for n in after.nodes if read_from != "weight"):
        if position == 0 or read_from != "both":
            name = f"copy{position if read_from == 'two copies' else 0}"
            copy = after.constants.get(name) or after.add_constant(torch.ones(3), name)
            after.set_input(node, 1, copy)
    assert bool([*find_copies(g, after)]) is (read_from != "weight")
    assert bool([*find_copies(g, after, may_replace=True)]) is (read_from in ("both", "two copies"))


def test_check_pass_rounding_pass_judged_on_second_call():
    """A pass that may round is judged on the second call too, because it may freeze state."""

    def read_as_it_was(graph, _):
        total = graph.constants["total"]
        if "frozen" not in graph.constants:
            frozen = graph.add_constant(total.data.nextafter(torch.zeros(3)), "frozen")
            graph.set_input(next(n for n in graph.nodes if n.op_type == "mul"), 1, frozen)

    g = Graph("counts")
    build, x = Builder(g, REGISTRY.operators), g.add_input(TensorType(torch.float32, (3,)), "x")
    total = g.add_constant(torch.ones(3), "total")
    g.add_output(build("mul", x, total))
    g.set_state("total", build("add", total, 1.0))
    p = Broken(read_as_it_was, "freeze", error=COMPOSE)
    found = check_passes([p], REGISTRY.operators, GraphCase("one", g, [CaseRun("twos", (torch.full((3,), 2.0),))]))
    assert found.comparison.verdict is Verdict.VALUE, found.comparison.message
