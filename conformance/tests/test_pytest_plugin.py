"""``pytest --pyargs clika_ref_conformance --target NAME``, as a user of the installed suite runs it."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from clika_ref_conformance import test_conformance
from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.worker_process import TaskProgress
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.reporting.json_report import read_json
from clika_ref_conformance.verdicts import Comparison, Verdict

WRONG = """
from dataclasses import dataclass
from clika_ref_conformance.targets.identity import Identity

@dataclass(frozen=True)
class Wrong(Identity):
    name: str = "wrong"

    def load(self, artifact):
        right = super().load(artifact)
        return lambda inputs: [t + 1 for t in right(inputs)]

@dataclass(frozen=True)
class Expected(Wrong):
    name: str = "expected"

@dataclass(frozen=True)
class Six(Identity):
    name: str = "six"

    def load(self, artifact):
        right = super().load(artifact)
        return lambda inputs: [t.clamp(max=6) for t in right(inputs)]

@dataclass(frozen=True)
class Fixed(Identity):
    name: str = "fixed"

@dataclass(frozen=True)
class Rejecting(Identity):
    name: str = "rejecting"

    def unsupported_reason(self, node):
        return "it takes nothing"
"""

DECLARED = """
[[deviation]]
id = "relu6-of-nan"
operators = ["relu6"]
free = ["nan"]
reason = "not seen in a part of a run by chance"
link = "https://example.org"
expires = "2999-01-01"
targets = ["rejecting"]

[[xfail]]
task = "operators/relu6/*"
reason = "it adds one"
link = "https://example.org"
expires = "2020-01-31"
targets = ["expected"]

[[xfail]]
task = "operators/relu*/*"
reason = "what it returns is 6 at most"
link = "https://example.org"
expires = "2999-01-01"
targets = ["six"]

[[xfail]]
task = "operators/relu6/float32"
reason = "it was wrong once"
link = "https://example.org"
expires = "2999-01-01"
targets = ["fixed"]
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest in a folder of its own, on one task, and return its exit status and output."""
    (tmp_path / "wrong_target.py").write_text(WRONG)
    (tmp_path / "deviations.toml").write_text(DECLARED)

    def start(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--pyargs", "clika_ref_conformance"]
        command += ["-k", "operators and relu6 and float32 or no-target", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        return done.returncode, done.stdout + done.stderr

    return start


@pytest.mark.slow
def test_pytest_plugin_runs_one_test_per_task(run):
    """Each task is a test."""
    code, output = run("--target", "identity", "--conformance-workers", "1")
    assert code == 0, output
    assert "2 passed" in output  # the task, and the run as a whole


@pytest.mark.slow
def test_pytest_plugin_nothing_proven_fails(run):
    """A run that proves nothing fails, as the command does."""
    code, output = run("--target", "wrong_target:Rejecting")
    assert code == 1, output
    assert "1 failed, 1 skipped" in output
    assert "no check proves anything about wrong_target:Rejecting: " in output
    assert "relu6-of-nan" not in output  # only a whole run reports that a deviation no longer occurs
    assert "unsupported:declared: relu6: it takes nothing" in output


@pytest.mark.slow
def test_pytest_plugin_xfails_alone_skip_and_fail_expired(run):
    """A task of expected failures only is skipped; once expired they fail the run."""
    code, output = run("--target", "wrong_target:Expected")
    assert code == 1, output
    assert "1 failed, 1 skipped" in output
    assert "xfail operators/relu6/* * expired (2020-01-31): check whether it still applies" in output
    assert "no check proves anything about wrong_target:Expected: " in output
    assert "xfail: expected (it adds one, https://example.org): fail:value: " in output


@pytest.mark.slow
def test_pytest_plugin_failure_writes_reproducer_and_commands(run, tmp_path):
    """A task that fails is a failing test and leaves a reproducer."""
    code, output = run("--target", "wrong_target:Wrong", "--conformance-out", "out")
    assert code == 1, output
    assert "1 failed" in output
    assert "fail:value: " in output
    assert list((tmp_path / "out" / "cases").glob("operators-relu6-float32-*.zip"))
    found = read_json(tmp_path / "out" / "report.json")
    assert [str(task.task) for task in found.tasks] == ["operators/relu6/float32"]
    digest = f"{zlib.crc32(b'operators/relu6/float32'):08x}"  # another task makes another part
    assert found.part.endswith(f" tasks, selected by pytest: {digest}")
    assert "operators/relu6" in (tmp_path / "out" / "junit.xml").read_text()
    commands = read_commands(tmp_path / "out" / "index.html")
    (failure,) = ET.parse(tmp_path / "out" / "junit.xml").getroot().iter("failure")  # noqa: S314 - of our own run
    assert failure.text.endswith(f"# in the folder of the report:\n{commands}")
    for command, said in zip(commands.splitlines(), ("fail:value: ", "", "elements are wrong"), strict=True):
        done = run_in_shell(command, tmp_path / "out")
        assert (done.returncode, said in done.stdout) == (int(bool(said)), True), done.stdout + done.stderr


def read_commands(page):
    """Return the commands of the first case of a page that has any."""
    cases = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)[1]
    return next(case["commands"] for case in json.loads(cases) if case["commands"])


def run_in_shell(command, folder):
    """Run a printed command in a shell with the programs of this environment on its path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(  # noqa: S602 - the command is of our own page
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_pytest_plugin_xpass_needs_all_tasks_of_xfail(run):
    """An xpass is reported only if all tasks of the expected failure ran."""
    code, output = run("--target", "wrong_target:Six")
    assert (code, "2 passed" in output) == (0, True), output  # it may fail in those that are not run
    code, output = run("--target", "wrong_target:Fixed")
    assert (code, "2 failed" in output) == (1, True), output
    assert "expected to fail (it was wrong once, https://example.org), but passes. Remove" in output


def test_pytest_plugin_abandoned_task_fails():
    """A task that its run abandoned fails; it is not skipped."""
    task = Task("operators", "relu")
    results = [CheckResult(task, "plan", Comparison(Verdict.NOT_RUN))]
    inconclusive_reasons = ["1 of 1 tasks did not end: 3 workers in a row ended before they were ready"]
    given_up = SimpleNamespace(
        results_of=lambda _: results,
        progress_by_task={task: TaskProgress(task)},
        inconclusive_reasons=inconclusive_reasons,
    )
    with pytest.raises(pytest.fail.Exception, match=r"^1 of 1 tasks did not end"):
        test_conformance.test_target_matches_eager(task, given_up)


@pytest.mark.slow
def test_pytest_plugin_without_target_skips_one_test(run):
    """Without a target there is one skipped test."""
    code, output = run()
    assert code == 0, output
    assert "1 skipped" in output
    assert "no target is given: name one with --target NAME or --target package.module:TARGET" in output


@pytest.mark.slow
def test_pytest_plugin_unknown_target_exits_4(run):
    """A target that does not exist is wrong usage."""
    code, output = run("--target", "nobody")
    assert code == 4, output
    assert "there is no target 'nobody'" in output
