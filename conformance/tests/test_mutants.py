"""Seeded faults are applied and undone without a trace, and the suite finds them."""

import json
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO

import pytest
from clika_ref_cleanup import push_transposes
from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution import run
from clika_ref_conformance.execution.levels import LEVELS
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.worker import make_suite
from clika_ref_conformance.levels.dynamic import EXPRESSIONS_SUBJECT
from clika_ref_conformance.mutants import mutant_runs
from clika_ref_conformance.mutants.catalogue import load_mutants
from clika_ref_conformance.mutants.console_output import (
    has_enough_kills,
    run_correct_targets_and_show,
    show_rates,
    show_result,
)
from clika_ref_conformance.mutants.kill_rate import KillReport, MutantResult, run_mutants, select_mutants
from clika_ref_conformance.mutants.seeding import Catalogue, Mutant, MutantSignatureError
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.verdicts import Comparison, Verdict
from rich.console import Console

from clika_ref.core.errors import ClikaError
from clika_ref.core.registry import load_registry

REGISTRY = load_registry()
EVERY = load_mutants()

QUICK = (
    "pooling-5-max_pool2d",
    "arithmetic-1-div",
    "indexing-9-topk",
    "norms-2-layer_norm",
    "attention-4-scaled_dot_product_attention",
    "passes-8-merge-common-subexpressions",
    "sizes-2-reshape",
    "quantization-2-quantize",
)
"""Mutants of each sort that are found within moments."""


@pytest.fixture
def suite(tmp_path):
    setup = WorkerSetup("onnxruntime", select_profile("quick", 0), dict(LEVELS), str(tmp_path))
    return make_suite(setup)


def read_mutable_state(registry):
    """Return the state that mutants change: the slots of every operator, and the calls of every pass."""
    slots = {name: (op.lowering, op.type_rule, op.random) for name, op in registry.operators.items()}
    return slots, {name: type(p).__call__ for name, p in registry.passes.items()}


def test_load_mutants_has_80_and_a_third_blind():
    """There are at least 80 mutants, and at least a third of them are blind."""
    blind = [m for m in EVERY.values() if m.blind]
    assert len(EVERY) >= 80
    assert len(EVERY) - len(blind) >= 60
    assert len(blind) * 3 >= len(EVERY)


@pytest.mark.parametrize("mutant", EVERY.values(), ids=lambda m: m.name)
def test_mutant_activate_restores_registry(mutant):
    """A mutant is removed without a trace."""
    before = read_mutable_state(REGISTRY)
    with mutant.activate(REGISTRY):
        pass
    assert read_mutable_state(REGISTRY) == before


@pytest.mark.parametrize("mutant", EVERY.values(), ids=lambda m: m.name)
def test_mutant_names_known_subject_and_levels(mutant):
    """A mutant names a subject and levels that exist."""
    assert mutant.subject in {*REGISTRY.operators, *REGISTRY.passes, *LEVELS, EXPRESSIONS_SUBJECT}
    assert mutant.levels
    assert set(mutant.levels) <= set(LEVELS)
    assert mutant.change


@pytest.mark.slow
@pytest.mark.slow_cases("attention-4-scaled_dot_product_attention")
@pytest.mark.parametrize("name", QUICK)
def test_mutant_run_finds_fault_and_idle_mutant_passes(suite, name):
    """The suite finds a mutant, and nothing without it."""
    found = mutant_runs.MutantRun(EVERY[name], suite).run()
    assert found.verdict.is_failure
    idle = Mutant("idle", EVERY[name].subject, "nothing", EVERY[name].levels[:1], lambda _: nullcontext())
    clean = mutant_runs.MutantRun(idle, suite).run()
    assert clean.verdict is Verdict.PASS, clean.comparison.message


@pytest.mark.slow
def test_mutant_run_failure_without_mutant_ignored(suite):
    """A check that also fails without the mutant does not count."""
    broken = Catalogue("broken")

    @broken.lowering("relu", "nothing is done")
    def _(original, op, x):
        return op.Identity(x)

    with broken.mutants[0].activate(suite.registry):
        mutant = Mutant("idle", "relu", "nothing", ("operators",), lambda _: nullcontext())
        trial = mutant_runs.MutantRun(mutant, suite)
        assert trial.run().verdict is Verdict.PASS
        assert trial.number > 1


def test_mutant_run_mutant_error_kills_nothing(suite):
    """An error in the mutant's own code kills nothing."""
    broken = Catalogue("broken")

    @broken.lowering("hardshrink", "the shape of an intermediate is asked for, which nothing knows")
    def _(original, op, x, **attrs):
        return original(op, op.reshape(x, op.shape(op.Neg(x))), **attrs)

    quick = replace(suite, profile=replace(suite.profile, rows=1, drawn=0, shrink_seconds=0.0))
    assert mutant_runs.MutantRun(broken.mutants[0], quick).run().verdict is Verdict.PASS


def test_mutant_run_wrong_signature_raises(suite):
    """A mutant that cannot be called in place of the original raises."""
    broken = Catalogue("broken")

    @broken.function("push-transposes", "an operand is lacking", push_transposes, "permute_attrs")
    def _(original, node):
        return node.attrs

    with pytest.raises(
        MutantSignatureError, match=r"permute_attrs cannot be called in place of it: too many positional arguments"
    ):
        mutant_runs.MutantRun(broken.mutants[0], suite).run()


def test_mutant_run_endless_check_kills_mutant(suite, monkeypatch):
    """A check that a mutant keeps from ending finds the mutant."""
    broken = Catalogue("broken")

    @broken.lowering("relu", "it never ends")
    def _(original, op, x):
        while True:
            pass

    monkeypatch.setattr(mutant_runs, "CHECK_TIMEOUT_S", 1.0)
    quick = replace(suite, profile=replace(suite.profile, rows=1, drawn=0, shrink_seconds=0.0))
    found = mutant_runs.MutantRun(broken.mutants[0], quick).run()
    assert (found.verdict, found.comparison.message) == (Verdict.HANG, "it did not end within 1 s")


@pytest.mark.slow
def test_run_mutants_failure_replays_in_other_worker():
    """A mutant is found in a worker, and its failure repeats in another."""
    killing = run_mutants([EVERY["arithmetic-1-div"]], seeds=(0, 1), workers=1)
    assert [t.is_killed for t in killing.results] == [True, True]
    assert [t.seed for t in killing.results] == [0, 1]
    assert killing.results[0].nodes == 1
    assert [r.verdict for r in killing.replayed] == [Verdict.PASS]
    assert json.loads(json.dumps(killing.as_json()))["rates"]["1"]["all"] == [1, 1]


def test_kill_report_replay_crash_counts_as_repeated():
    """A reproducer of a hang is repeated if it ends its worker."""
    again = [CheckResult(Task("replays", name), "replay", Comparison(Verdict.CRASH)) for name in ("ends", "differs")]
    killing = KillReport(
        "quick", [make_mutant_result("ends", Verdict.HANG), make_mutant_result("differs", Verdict.VALUE)], again
    )
    assert [r.task.subject for r in killing.failed_replays] == ["differs"]


@pytest.mark.slow
def test_run_mutants_own_fault_of_suite_raises(monkeypatch):
    """A worker that a fault of the suite ended kills no mutant."""
    monkeypatch.setattr("clika_ref_conformance.mutants.kill_rate.MUTATION_LEVELS", {"mutants": "failing_level"})
    with pytest.raises(ClikaError, match=r"the suite itself failed on mutants/arithmetic-1-div/.*exit status 7"):
        run_mutants(select_mutants(["arithmetic-1-"]), seeds=(0,), workers=1)


def test_run_mutants_untried_mutants_raise(monkeypatch):
    """Mutants that were not tried are not survivors."""
    start_worker = run.Execution._start_worker

    def start_and_kill(self):
        start_worker(self)
        self.workers[-1].kill()

    monkeypatch.setattr(run.Execution, "_start_worker", start_and_kill)
    with pytest.raises(ClikaError, match="1 of 1 tasks did not end: 3 workers in a row ended before they were ready"):
        run_mutants([EVERY["arithmetic-1-div"]], seeds=(0,), workers=1)


def test_select_mutants_matches_name_and_description():
    """Mutants are selected by name and by description."""
    assert [m.name for m in select_mutants(["arithmetic-1-"])] == ["arithmetic-1-div"]
    assert "norms-2-layer_norm" in [m.name for m in select_mutants(["only the last dim"])]
    with pytest.raises(ClikaError, match=r"no mutant contains nonsense; their names begin with .*pooling"):
        select_mutants(["nonsense"])


def print_results(killing):
    console = Console(record=True, width=200, file=StringIO())
    for trial in killing.results:
        show_result(trial, console)
    show_rates(killing, console)
    return console.export_text()


def make_mutant_result(name, verdict, *, blind=False, **more):
    return MutantResult(name, "relu", "it is wrong", blind, 0, verdict, **more)


def test_show_rates_prints_all_blind_and_own():
    """Kill rates are printed for all, for blind and for own mutants."""
    killed = make_mutant_result("a", Verdict.VALUE, task="operators/relu/float32", check="cover-00", checks=1, nodes=2)
    survivor = make_mutant_result("b", Verdict.PASS, blind=True, checks=40)
    crash = make_mutant_result("c", Verdict.CRASH)
    killing = KillReport("quick", [killed, survivor, crash])
    text = print_results(killing)
    assert "seed 0: a killed by operators/relu/float32: cover-00, check 1" in text
    assert "seed 0: b SURVIVED 40 checks" in text
    assert "seed 0: c killed as it ended the worker: crash" in text
    assert "quick, seed 0: killed all 2 of 3 (66.7 %), blind 0 of 1 (0.0 %), own 2 of 2 (100.0 %)" in text
    assert "reduced failing graphs of operators: median 2 nodes" in text
    assert not has_enough_kills(killing)


def test_has_enough_kills_needs_97_percent_or_all():
    """Profile quick must find 97 of 100 mutants, and ci all."""
    results = [make_mutant_result(str(i), Verdict.VALUE) for i in range(97)] + [
        make_mutant_result(str(i), Verdict.PASS) for i in range(3)
    ]
    assert has_enough_kills(KillReport("quick", results))
    assert not has_enough_kills(KillReport("ci", results))
    assert not has_enough_kills(KillReport("quick", [*results[1:], make_mutant_result("98", Verdict.PASS)]))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "status"), [("identity", 0), ("faulty_targets:WRONG", 1)])
def test_run_correct_targets_no_alarm_for_any_seed(target, status, capsys):
    """A correct target raises no alarm with any seed."""
    options = {"profile": "quick", "subjects": ["relu"], "levels": ["operators"], "workers": 1}
    assert run_correct_targets_and_show([target], seeds=2, **options) == status
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith(target)]
    assert [head.split(": ")[0] for head in heads] == [f"{target}, quick, seed {seed}" for seed in range(2)]
    assert all((" 0 failures in " in head) == (status == 0) for head in heads)
    assert any("operators/relu/float32" in line for line in lines) == (status == 1)


def test_run_correct_targets_interrupt_ends_all_runs(monkeypatch):
    """An interrupted run ends the runs of correct targets."""
    inconclusive_reasons = ("9 of 9 tasks are not done: the run was interrupted",)
    record = RunRecord("identity", "quick", 0, {}, {}, [], inconclusive_reasons=inconclusive_reasons, is_abandoned=True)
    begun = []
    monkeypatch.setattr(
        "clika_ref_conformance.mutants.console_output.execute_plan", lambda plan: begun.append(plan) or record
    )
    options = {"profile": "quick", "subjects": ("relu",), "levels": (), "workers": 1}
    with pytest.raises(ClikaError, match="9 of 9 tasks are not done: the run was interrupted"):
        run_correct_targets_and_show(["identity"], seeds=2, **options)
    assert len(begun) == 1


def test_find_tasks_own_levels_first(suite):
    """A mutant meets its own levels first, then all tasks of its subject."""
    pooling = [str(task) for task in mutant_runs.find_tasks(EVERY["pooling-5-max_pool2d"], suite)]
    assert pooling[0].startswith("operators/max_pool2d/")
    assert any(task.startswith("dynamic/max_pool2d/") for task in pooling)
    packing = next(m for m in EVERY.values() if m.levels == ("quantization",))
    met = [str(task) for task in mutant_runs.find_tasks(packing, suite)]
    assert {"quantization/quantize+dequantize", "quantization/packing"} <= set(met)
    rounding = next(m for m in EVERY.values() if m.subject == "quantize" and m.levels == ("operators",))
    assert "quantization/quantize+dequantize" in [str(task) for task in mutant_runs.find_tasks(rounding, suite)]
