"""The commands: their output, their exit status, and the imports that ``--help`` avoids."""

import importlib.util
import io
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from clika_ref_cli import cli as core
from clika_ref_conformance.cases import Task
from clika_ref_conformance.cli import LEVELS, app
from clika_ref_conformance.execution import levels
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reporting import run_console
from clika_ref_conformance.verdicts import Comparison, Verdict
from rich.console import Console
from typer.testing import CliRunner

from clika_ref.reporting.progress import SimpleProgressBar

TASK = Task("operators", "relu", "float32")


@pytest.fixture
def fake_run(monkeypatch):
    """Replace `run` by a function that prints a record of the test; return the list of its requests."""
    asked = []

    def choose(*results, **changes):
        plan = changes.pop("plan", {TASK: tuple(r.name for r in results)})
        record = RunRecord("identity", "quick", 0, {}, plan, results, 1.5, **changes)

        def run(request):
            asked.append(request)
            run_console.print_record(record, run_console.result_console())
            return record

        monkeypatch.setattr(run_console, "run_and_show", run)
        return asked

    return choose


def run(*arguments):
    return CliRunner().invoke(app, ["run", "--target", "identity", *arguments])


def make_result(name="first", verdict=Verdict.PASS, message="", **changes):
    return CheckResult(TASK, name, Comparison(verdict, message), **changes)


def test_run_passing_prints_summary_and_exits_0(fake_run):
    """A run that passes prints its summary and exits with 0."""
    asked = fake_run(make_result(), make_result("second"))
    found = run("--seed", "3", "-k", "relu", "-k", "exp", "--level", "operators", "--workers", "1", "--profile", "ci")
    assert found.exit_code == 0, found.output
    assert "identity passed: 2 checks of 1 tasks in 1.5 s (quick, seed 0): 2 pass" in found.output
    (request,) = asked
    assert (request.profile.name, request.profile.seed, request.workers) == ("ci", 3, 1)
    assert (request.subjects, request.levels, request.out) == (("relu", "exp"), ("operators",), None)


def test_run_limit_options_override_profile(fake_run):
    """Limits from the command line replace those of the profile."""
    asked = fake_run(make_result())
    run()
    run("--memory-limit", "1.5", "--case-seconds", "120")
    run("--memory-limit", "0")
    limits = [(request.profile.memory_bytes, request.profile.case_seconds) for request in asked]
    assert limits == [(4 * 2**30, 30.0), (3 * 2**29, 120.0), (0, 30.0)]


def test_run_failures_printed_and_exit_1(fake_run):
    """Failures are printed, and the exit status is 1."""
    fake_run(
        make_result(),
        make_result("second", Verdict.VALUE, "output 0 is off", run="nan-first", reproducer="cases/1.zip"),
    )
    found = run()
    assert found.exit_code == 1
    assert (
        "fail:value: operators/relu/float32: second (inputs nan-first, cases/1.zip)\n  output 0 is off" in found.output
    )
    assert "identity FAILED: 2 checks of 1 tasks in 1.5 s (quick, seed 0): 1 fail:value, 1 pass" in found.output


def test_run_doubts_printed_and_exit_3(fake_run):
    """A run with too little evidence says so and exits with 3."""
    fake_run(
        make_result(verdict=Verdict.UNSUPPORTED),
        inconclusive_reasons=["nothing was proven of identity: 1 unsupported:declared"],
    )
    found = run()
    assert found.exit_code == 3
    assert (
        "nothing was proven of identity: 1 unsupported:declared\nidentity PROVES TOO LITTLE: 1 checks" in found.output
    )


def test_run_failure_message_names_call_once(fake_run):
    """A failure names its call once."""
    facts = {"call": "relu(float32[3])"}
    bare, quoting = "output 0 is off", "the samples draw relu(float32[3]), which eager rejects"
    fake_run(*(make_result(text, Verdict.VALUE, text, facts=facts) for text in (bare, quoting)))
    assert f"\n  relu(float32[3]): {bare}\n" in run().output
    assert f"\n  {quoting}\n" in run().output


def test_run_many_failures_prints_first_20(fake_run):
    """Only the first failures are printed."""
    fake_run(*(make_result(str(i), Verdict.VALUE) for i in range(25)))
    assert "... and 5 more failures; --out" in run().output


def test_run_missing_results_exit_3(fake_run):
    """A plan without matching results exits with 3."""
    fake_run(make_result(), plan={TASK: ("first", "second")})
    found = run()
    assert found.exit_code == 3
    assert "operators/relu/float32: second: planned 1 times, 0 results" in found.output
    assert "COUNTS DO NOT ADD UP" in found.output


def test_run_problems_and_deviations_printed(fake_run):
    """Problems and observed deviations are printed."""
    seen = {"id": "d", "reason": "it does", "occurred": 3, "applicable": 4}
    fake_run(
        make_result(), problems=("the deviation e is gone",), deviations=(seen, {**seen, "id": "f", "occurred": 0})
    )
    found = run()
    assert found.exit_code == 1
    assert "the deviation e is gone" in found.output
    assert "deviation d: 3 checks: it does" in found.output
    assert "deviation f" not in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nobody"], "there is no target 'nobody'"),
        (["--profile", "slow"], "there is no profile 'slow'"),
        (["--level", "operator"], "there is no level 'operator'; did you mean operators?"),
        (["--level", "xyz"], "there is no level 'xyz'. Levels are contract, operators,"),
        (["-k", "rellu", "--level", "operators"], "no task of the levels operators contains rellu; did you mean relu"),
        (
            ["-k", "relu", "-k", "rellu", "--level", "operators"],
            "no task of the levels operators contains rellu; did you",
        ),
        (["--out", "/proc/nowhere"], "cannot create the report folder /proc/nowhere"),
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--memory-limit", "-1"], "Invalid value for '--memory-limit'"),
        (["--case-seconds", "0"], "Invalid value for '--case-seconds'"),
    ],
)
def test_run_wrong_usage_exits_2(arguments, message):
    """Wrong usage exits with 2 and a message."""
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.output


def test_commands_each_documented():
    """docs/conformance.md describes every command."""
    text = (Path(__file__).parents[2] / "docs/conformance.md").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in app.registered_commands]
    assert [name for name in names if f"clika-ref conformance {name}" not in text] == []


def test_help_lists_each_level():
    """The help lists every level."""
    assert LEVELS.replace(" or ", ", ").split(", ") == [*levels.LEVELS]
    assert "contract, operators" in run("--help").output


@pytest.mark.slow
def test_help_imports_no_heavy_package():
    """The help imports neither torch nor Hypothesis."""
    code = (
        "import sys; sys.argv = ['clika-ref', 'conformance', 'run', '--help']\n"
        "from clika_ref_cli.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'hypothesis', 'onnx', 'pytest'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--target" in done.stdout


def test_add_plugin_commands_broken_command_keeps_others(monkeypatch, capsys):
    """A plugin command that cannot be loaded does not affect the others."""
    broken = EntryPoint("broken", "no_such_module:app", core.COMMAND_ENTRY_POINT_GROUP)
    works = EntryPoint("works", "clika_ref_conformance.cli:app", core.COMMAND_ENTRY_POINT_GROUP)
    monkeypatch.setattr(core.importlib.metadata, "entry_points", lambda group: [works, broken])
    joined = typer.Typer()
    core.add_plugin_commands(joined)
    assert [group.name for group in joined.registered_groups] == ["works"]
    assert "clika-ref broken: cannot load unknown distribution: ModuleNotFoundError" in capsys.readouterr().err


def test_progress_reporter_prints_line_at_intervals(monkeypatch):
    """The bar names the current task; a pipe gets a line now and then."""
    console = Console(file=io.StringIO(), width=200)
    bar = SimpleProgressBar(total=2, desc="Conformance of faulty", unit="tasks", disable=True)
    watch = run_console.ProgressReporter("faulty", bar, console)
    busy = SimpleNamespace(ended_tasks=0, workers=[SimpleNamespace(progress=SimpleNamespace(task=TASK))])
    watch(CheckResult(TASK, "a", Comparison(Verdict.VALUE)), busy)
    assert bar.desc == "Conformance of faulty, 1 checks, 1 failed (operators/relu/float32)"
    assert console.file.getvalue() == ""
    watch.due = 0.0
    watch(None, SimpleNamespace(ended_tasks=1, workers=[SimpleNamespace(progress=None)]))
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("Conformance of faulty, 1 checks, 1 failed  1/2")
    watch(None, busy)
    assert console.file.getvalue().splitlines() == [line]  # the next is due in half a minute


@pytest.mark.parametrize("command", ["mutants", "alarms"])
def test_mutants_absent_from_the_wheel_are_misuse(command, monkeypatch):
    """The message names the folder and the installation that has it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 2
    shown = " ".join(done.stderr.split())
    assert f"cannot run clika-ref conformance {command}: the installed suite does not contain" in shown
    assert "Install it from a clone: pip install --editable ./conformance" in shown
