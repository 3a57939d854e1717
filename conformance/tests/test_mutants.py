"""Seeded faults are put in and taken out without a trace, and the suite finds them."""

import json
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
from clika_ref_conformance.mutants.seeding import Catalogue, Mutant, MutantSignatureError, make_no_op_fault
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import Result, RunRecord
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
    pytest.param("attention-4-scaled_dot_product_attention", marks=pytest.mark.slow),
    "passes-8-merge-common-subexpressions",
    "sizes-2-reshape",
    "quantization-2-quantize",
)
"""Mutants of each sort that are found within moments."""


@pytest.fixture
def suite(tmp_path):
    setup = WorkerSetup("onnxruntime", select_profile("quick", 0), dict(LEVELS), str(tmp_path))
    return make_suite(setup)


def state_of(registry):
    """Return what mutants change: the slots of every operator, and the calls of every pass."""
    slots = {name: (op.lowering, op.type_rule, op.random) for name, op in registry.operators.items()}
    return slots, {name: type(p).__call__ for name, p in registry.passes.items()}


def test_there_are_as_many_as_the_issue_asks_for_and_a_third_is_blind():
    blind = [m for m in EVERY.values() if m.blind]
    assert len(EVERY) >= 80
    assert len(EVERY) - len(blind) >= 60
    assert len(blind) * 3 >= len(EVERY)


@pytest.mark.parametrize("mutant", EVERY.values(), ids=lambda m: m.name)
def test_a_mutant_is_taken_out_without_a_trace(mutant):
    before = state_of(REGISTRY)
    with mutant.activate(REGISTRY):
        pass
    assert state_of(REGISTRY) == before


@pytest.mark.parametrize("mutant", EVERY.values(), ids=lambda m: m.name)
def test_a_mutant_names_a_subject_and_levels_that_exist(mutant):
    assert mutant.subject in {*REGISTRY.operators, *REGISTRY.passes, *LEVELS, EXPRESSIONS_SUBJECT}
    assert mutant.levels
    assert set(mutant.levels) <= set(LEVELS)
    assert mutant.change


@pytest.mark.parametrize("name", QUICK)
def test_the_suite_finds_a_mutant_and_nothing_without_it(suite, name):
    found = mutant_runs.MutantRun(EVERY[name], suite).run()
    assert found.verdict.is_failure
    idle = Mutant("idle", EVERY[name].subject, "nothing", EVERY[name].levels[:1], make_no_op_fault())
    clean = mutant_runs.MutantRun(idle, suite).run()
    assert clean.verdict is Verdict.PASS, clean.comparison.message


@pytest.mark.slow
def test_what_fails_without_a_mutant_too_is_not_its_doing(suite):
    broken = Catalogue("broken")

    @broken.lowering("relu", "nothing is done")
    def _(original, op, x):
        return op.Identity(x)

    with broken.mutants[0].activate(suite.registry):
        mutant = Mutant("idle", "relu", "nothing", ("operators",), make_no_op_fault())
        trial = mutant_runs.MutantRun(mutant, suite)
        assert trial.run().verdict is Verdict.PASS
        assert trial.number > 1


def test_a_mutant_whose_own_code_raises_finds_itself_only(suite):
    broken = Catalogue("broken")

    @broken.lowering("hardshrink", "the shape of an intermediate is asked for, which nothing knows")
    def _(original, op, x, **attrs):
        return original(op, op.reshape(x, op.shape(op.Neg(x))), **attrs)

    quick = replace(suite, profile=replace(suite.profile, rows=1, drawn=0, shrink_seconds=0.0))
    assert mutant_runs.MutantRun(broken.mutants[0], quick).run().verdict is Verdict.PASS


def test_a_mutant_that_cannot_be_called_in_place_of_what_it_alters_finds_nothing(suite):
    """One lacked an operand that the method had been given: its TypeError was taken for a fault that was found."""
    broken = Catalogue("broken")

    @broken.function("push-transposes", "an operand is lacking", push_transposes, "permute_attrs")
    def _(original, node):
        return node.attrs

    with pytest.raises(
        MutantSignatureError, match=r"permute_attrs cannot be called in place of it: too many positional arguments"
    ):
        mutant_runs.MutantRun(broken.mutants[0], suite).run()


def test_a_check_that_does_not_end_with_a_mutant_finds_it(suite, monkeypatch):
    """Of one, moving transposes went on until the memory was full, 12 minutes later."""
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
def test_a_mutant_is_found_in_a_worker_and_its_failure_fails_again_in_another():
    killing = run_mutants([EVERY["arithmetic-1-div"]], seeds=(0, 1), workers=1)
    assert [t.is_killed for t in killing.trials] == [True, True]
    assert [t.seed for t in killing.trials] == [0, 1]
    assert killing.trials[0].nodes == 1
    assert [r.verdict for r in killing.replayed] == [Verdict.PASS]
    assert json.loads(json.dumps(killing.as_json()))["rates"]["1"]["all"] == [1, 1]


def test_a_reproducer_of_what_ended_its_worker_fails_again_where_it_ends_another():
    again = [Result(Task("replays", name), "replay", Comparison(Verdict.CRASH)) for name in ("ends", "differs")]
    killing = KillReport("quick", [trial("ends", Verdict.HANG), trial("differs", Verdict.VALUE)], again)
    assert [r.task.subject for r in killing.failed_replays] == ["differs"]


@pytest.mark.slow
def test_a_worker_that_the_suite_s_own_fault_ended_kills_nothing(monkeypatch):
    """What each worker raised of itself was taken for the doing of the mutants: all of them were killed."""
    monkeypatch.setattr("clika_ref_conformance.mutants.kill_rate.MUTATION_LEVELS", {"mutants": "failing_level"})
    with pytest.raises(ClikaError, match=r"the suite itself failed on mutants/arithmetic-1-div/.*exit status 7"):
        run_mutants(select_mutants(["arithmetic-1-"]), seeds=(0,), workers=1)


def test_mutants_that_were_not_tried_are_not_taken_for_survivors(monkeypatch):
    hire = run.Execution._start_worker

    def hire_and_kill(self):
        hire(self)
        self.workers[-1].kill()

    monkeypatch.setattr(run.Execution, "_start_worker", hire_and_kill)
    with pytest.raises(ClikaError, match="1 of 1 tasks are not done: 3 workers in a row ended before they were ready"):
        run_mutants([EVERY["arithmetic-1-div"]], seeds=(0,), workers=1)


def test_words_choose_mutants_by_name_and_by_what_is_wrong():
    assert [m.name for m in select_mutants(["arithmetic-1-"])] == ["arithmetic-1-div"]
    assert "norms-2-layer_norm" in [m.name for m in select_mutants(["only the last side"])]
    with pytest.raises(ClikaError, match=r"no mutant contains nonsense; their names begin with .*pooling"):
        select_mutants(["nonsense"])


def shown(killing):
    console = Console(record=True, width=200, file=StringIO())
    for trial in killing.trials:
        show_result(trial, console)
    show_rates(killing, console)
    return console.export_text()


def trial(name, verdict, *, blind=False, **more):
    return MutantResult(name, "relu", "it is wrong", blind, 0, verdict, **more)


def test_kill_rates_are_printed_for_all_for_the_blind_and_for_ours():
    killed = trial("a", Verdict.VALUE, task="operators/relu/float32", check="cover-00", checks=1, nodes=2)
    survivor = trial("b", Verdict.PASS, blind=True, checks=40)
    crash = trial("c", Verdict.CRASH)
    killing = KillReport("quick", [killed, survivor, crash])
    text = shown(killing)
    assert "seed 0: a killed by operators/relu/float32: cover-00, check 1" in text
    assert "seed 0: b SURVIVED 40 checks" in text
    assert "seed 0: c killed as it ended the worker: crash" in text
    assert "quick, seed 0: killed all 2 of 3 (66.7 %), blind 0 of 1 (0.0 %), own 2 of 2 (100.0 %)" in text
    assert "reduced failing graphs of operators: median 2 nodes" in text
    assert not has_enough_kills(killing)


def test_quick_must_find_97_of_100_and_ci_all():
    trials = [trial(str(i), Verdict.VALUE) for i in range(97)] + [trial(str(i), Verdict.PASS) for i in range(3)]
    assert has_enough_kills(KillReport("quick", trials))
    assert not has_enough_kills(KillReport("ci", trials))
    assert not has_enough_kills(KillReport("quick", [*trials[1:], trial("98", Verdict.PASS)]))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "status"), [("identity", 0), ("odd_targets:WRONG", 1)])
def test_a_target_that_is_right_raises_no_alarm_with_any_seed(target, status, capsys):
    options = {"profile": "quick", "subjects": ["relu"], "levels": ["operators"], "workers": 1}
    assert run_correct_targets_and_show([target], seeds=2, **options) == status
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith(target)]
    assert [head.split(": ")[0] for head in heads] == [f"{target}, quick, seed {seed}" for seed in range(2)]
    assert all((" 0 failures in " in head) == (status == 0) for head in heads)
    assert any("operators/relu/float32" in line for line in lines) == (status == 1)


def test_runs_of_sound_targets_end_with_the_one_that_is_interrupted(monkeypatch):
    doubts = ("9 of 9 tasks are not done: the run was interrupted",)
    record = RunRecord("identity", "quick", 0, {}, {}, [], doubts=doubts, is_abandoned=True)
    begun = []
    monkeypatch.setattr(
        "clika_ref_conformance.mutants.false_alarms.execute_plan", lambda plan: begun.append(plan) or record
    )
    options = {"profile": "quick", "subjects": ("relu",), "levels": (), "workers": 1}
    with pytest.raises(ClikaError, match="9 of 9 tasks are not done: the run was interrupted"):
        run_correct_targets_and_show(["identity"], seeds=2, **options)
    assert len(begun) == 1


def test_a_mutant_meets_its_own_levels_first_and_its_subject_wherever_it_stands(suite):
    pooling = [str(task) for task in mutant_runs.find_tasks(EVERY["pooling-5-max_pool2d"], suite)]
    assert pooling[0].startswith("operators/max_pool2d/")
    assert any(task.startswith("dynamic/max_pool2d/") for task in pooling)
    packing = next(m for m in EVERY.values() if m.levels == ("quantization",))
    met = [str(task) for task in mutant_runs.find_tasks(packing, suite)]
    assert {"quantization/quantize+dequantize", "quantization/packing"} <= set(met)
    rounding = next(m for m in EVERY.values() if m.subject == "quantize" and m.levels == ("operators",))
    assert "quantization/quantize+dequantize" in [str(task) for task in mutant_runs.find_tasks(rounding, suite)]
