"""Reproducers of checks that crash their worker: the zip contains the case, and replaying it crashes again."""

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Task
from clika_ref_conformance.deviations import Declarations
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.run import RunPlan, RunRequest
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reporting import crash_reproducers, run_console
from clika_ref_conformance.reporting.crash_reproducers import MAX_REPRODUCERS, add_crash_reproducers, record_crash
from clika_ref_conformance.reporting.replay import read_reproducer
from clika_ref_conformance.reporting.replay_process import replay_in_process
from clika_ref_conformance.reporting.run_console import run_and_show
from clika_ref_conformance.verdicts import Comparison, Verdict

from clika_ref.core.registry import load_registry

HERE = Path(__file__).parent
TASK = Task("crashing", "relu", "float32")


def tasks(suite):
    """As a level: one task."""
    return [TASK]


def raise_if_run():
    """Replace a check that passed before the crash and must not run again."""
    raise RuntimeError("it is run")


def checks(task, suite):
    """A level: a relu of three sizes; the last two are too large for a deadly target."""

    def make():
        inputs = [torch.arange(float(n)) for n in (1, 3, 5)]
        graph = build_call_graph(suite.registry.operators["relu"], [torch.zeros(3)], {})
        return GraphCase("relu", graph, [CaseRun("three", (inputs[1],))])

    return [
        Check("harmless", raise_if_run),
        Check("row", lambda: replace(run_case(make(), suite), name="row")),
    ]


def setup(out, target, seconds=30.0):
    """Return the setup of a worker."""
    profile = replace(PROFILES["quick"], case_seconds=seconds)
    path = (str(HERE), str(HERE / "fakes"))
    return WorkerSetup(
        f"crashing_targets:{target}", profile, {"crashing": "test_crash_reproducers"}, "", str(out), path
    )


def make_crash_result(name="row", verdict=Verdict.CRASH, task=TASK):
    """Return the result of a check that ended its worker."""
    return CheckResult(task, name, Comparison(verdict, "the worker died (SIGSEGV)"))


def make_plan(out):
    """Return the plan of a run with a folder for its report, or without one."""
    return RunPlan(RunRequest("crashing_targets:Crashing", out=out), {}, (), Declarations((), ()))


def record_of(results):
    """Return the record of a run with these planned checks."""
    plan = {}
    for result in results:
        plan.setdefault(result.task, []).append(result.name)
    return RunRecord("t", "quick", 0, {}, plan, results)


def run_script(path, folder):
    """Unpack a reproducer and run its script in a fresh process."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    command = [sys.executable, str(folder / "unpacked/repro.py")]
    return subprocess.run(command, cwd=HERE / "fakes", capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_record_crash_stores_inputs_of_crash(tmp_path):
    """The inputs that end a worker are in the reproducer."""
    path = record_crash(make_crash_result(), setup(tmp_path, "Crashing"))
    assert path.startswith("cases/crashing-relu-float32-")
    found = read_reproducer(tmp_path / path, load_registry())
    assert (found.task, found.check, found.verdict) == (TASK, "row", "crash")
    (run,) = found.case.runs
    assert torch.equal(run.inputs[0], torch.arange(3.0))
    done = run_script(tmp_path / path, tmp_path)
    assert (done.returncode, "with status -11" in done.stdout) == (1, True)
    assert "crashing of relu on crashing_targets:Crashing: crash" in done.stdout


@pytest.mark.slow
def test_record_crash_compiler_crash_has_no_inputs(tmp_path):
    """A graph that crashes the compiler is recorded without inputs."""
    path = record_crash(make_crash_result(), setup(tmp_path, "Fatal"))
    assert read_reproducer(tmp_path / path, load_registry()).case.runs == []
    assert "with status -11" in run_script(tmp_path / path, tmp_path).stdout


@pytest.mark.slow
def test_record_crash_hang_stores_inputs(tmp_path):
    """Inputs that hang the target are recorded too."""
    path = record_crash(make_crash_result(verdict=Verdict.HANG), setup(tmp_path, "Sleepy", seconds=2.0))
    (run,) = read_reproducer(tmp_path / path, load_registry()).case.runs
    assert torch.equal(run.inputs[0], torch.arange(3.0))
    done = run_script(tmp_path / path, tmp_path)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("target", "verdict"), [("Sleepy", "hang"), ("Greedy", "memory")])
def test_replay_in_process_reports_hang_or_memory(tmp_path, monkeypatch, capfd, target, verdict):
    """Replay reports how the target ended and uses the limits of the run."""
    seconds = 5.0 if verdict == "hang" else 60.0
    limited = replace(PROFILES["quick"], case_seconds=seconds, memory_bytes=2**31)
    told = replace(setup(tmp_path, target), profile=limited)
    path = record_crash(make_crash_result(verdict=Verdict(verdict)), told)
    monkeypatch.chdir(HERE / "fakes")
    assert replay_in_process(tmp_path / path, f"crashing_targets:{target}") == 1
    assert capfd.readouterr().out.startswith(f"{verdict}: ")


@pytest.mark.slow
def test_record_crash_before_compile_repeats_check(tmp_path):
    """A check that dies before compilation is recorded for repetition."""
    path = record_crash(make_crash_result(verdict=Verdict.HANG), setup(tmp_path, "Doubtful", seconds=2.0))
    found = read_reproducer(tmp_path / path, load_registry())
    assert (found.repeats_check, found.check, found.verdict) == (True, "row", "hang")


@pytest.mark.slow
def test_record_crash_exit_status_0_recorded(tmp_path, monkeypatch, capfd):
    """A target that exits with status 0 is recorded too."""
    path = record_crash(make_crash_result(), setup(tmp_path, "Leaving"))
    (run,) = read_reproducer(tmp_path / path, load_registry()).case.runs
    assert torch.equal(run.inputs[0], torch.arange(3.0))
    monkeypatch.chdir(HERE / "fakes")
    assert replay_in_process(tmp_path / path, "crashing_targets:Leaving") == 1
    assert "crash: the target ended its process with status 0" in capfd.readouterr().out
    assert replay_in_process(tmp_path / path, "identity") == 0
    assert replay_in_process(tmp_path / "none.zip") == 2


@pytest.mark.slow
def test_record_crash_orphan_process_causes_no_delay(tmp_path, monkeypatch):
    """A process that a target leaves running does not delay its reproducer."""
    monkeypatch.setenv("MARKS_FOLDER", str(tmp_path))
    assert record_crash(make_crash_result(), setup(tmp_path, "Orphaning"))
    assert not (tmp_path / "lived").exists()


@pytest.mark.slow
def test_record_crash_surviving_check_has_no_reproducer(tmp_path):
    """A check that does not crash again has no reproducer."""
    assert record_crash(make_crash_result(), replace(setup(tmp_path, ""), target="identity")) == ""
    assert list((tmp_path / "cases").iterdir()) == []


def test_add_crash_reproducers_first_of_task_and_verdict(tmp_path, monkeypatch):
    """The first check of each task and verdict is run again."""
    asked = []
    monkeypatch.setattr(
        crash_reproducers, "record_crash", lambda r, _: asked.append((r.name, r.verdict)) or f"cases/{r.name}.zip"
    )
    many = [make_crash_result(f"n{i}", task=replace(TASK, subject=str(i))) for i in range(MAX_REPRODUCERS + 5)]
    known = replace(make_crash_result("e", Verdict.MEMORY), reproducer="cases/own.zip")
    results = [
        make_crash_result("a"),
        make_crash_result("b"),
        make_crash_result("c", Verdict.HANG),
        make_crash_result("d", Verdict.VALUE),
        known,
        *many,
    ]
    found = add_crash_reproducers(record_of(results), make_plan(tmp_path))
    assert [r.reproducer for r in found.results[:5]] == ["cases/a.zip", "", "cases/c.zip", "", "cases/own.zip"]
    assert len(asked) == MAX_REPRODUCERS
    assert found.find_accounting_errors() == []


@pytest.mark.parametrize("is_given_up", [False, True])
def test_add_crash_reproducers_interrupted_run_repeats_none(tmp_path, monkeypatch, is_given_up):
    """An interrupted run repeats no check."""
    asked = []
    record = replace(record_of([make_crash_result()]), is_abandoned=is_given_up)
    monkeypatch.setattr(crash_reproducers, "record_crash", lambda result, _: asked.append(result.name) or "")
    assert add_crash_reproducers(record, make_plan(None)) is record
    add_crash_reproducers(record, make_plan(tmp_path))
    assert asked == [] if is_given_up else ["row"]


def test_run_and_show_removes_old_reproducers(tmp_path, monkeypatch):
    """A report keeps no reproducers of an earlier run."""
    stale, kept, other = (tmp_path / "cases" / name for name in ("a-0123abcd.zip", "b-89abcdef.zip", "mine.zip"))
    stale.parent.mkdir()
    for path in (stale, kept, other):
        path.touch()
    record = record_of([replace(make_crash_result(verdict=Verdict.VALUE), reproducer="cases/b-89abcdef.zip")])
    monkeypatch.setattr(run_console, "execute_plan", lambda *_: record)
    run_and_show(RunRequest("identity", subjects=("relu",), out=tmp_path))
    assert (tmp_path / "report.json").exists()
    assert (stale.exists(), kept.exists(), other.exists()) == (False, True, True)


@pytest.mark.slow
def test_run_and_show_crash_reproducer_in_report(tmp_path, monkeypatch):
    """A run with a crash has the reproducer in its report."""
    for place in (HERE, HERE / "fakes"):
        monkeypatch.syspath_prepend(place)
    catalogue = {"crashing": "test_crash_reproducers"}
    record = run_and_show(RunRequest("crashing_targets:Crashing", out=tmp_path, workers=1, available_levels=catalogue))
    (crashed,) = (r for r in record.results if r.verdict is Verdict.CRASH)
    assert (crashed.name, record.exit_code) == ("row", 1)
    assert read_reproducer(tmp_path / crashed.reproducer, load_registry()).verdict == "crash"
    assert crashed.reproducer in (tmp_path / "index.html").read_text(encoding="utf-8")
