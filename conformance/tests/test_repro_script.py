"""Failures without a number: replay and the script of a reproducer find them again, and no others."""

import atexit
import os
import sys
from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.check_runner import run_check
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.reporting.replay import replay
from clika_ref_conformance.reproducing.reproducers import make_reproducer, write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Comparison, Verdict
from small_cases import run_script

from clika_ref.core.registry import load_registry

REGISTRY = load_registry()
TASK = Task("operators", "relu", "float32")

TARGETS = '''
import atexit
import os

import torch
from clika_ref_onnxruntime.target import OnnxRuntime

if os.environ.get("BROKEN"):
    raise ImportError("libruntime.so.10: cannot open shared object file")


class Widening(OnnxRuntime):
    def load(self, artifact):
        torch.set_default_dtype(torch.float64)
        return super().load(artifact)


class Reusing(OnnxRuntime):
    def load(self, artifact):
        runner, kept = super().load(artifact), []
        def run(inputs):
            kept[:] = kept or runner(inputs)
            for old, new in zip(kept, runner(inputs)):
                old.copy_(new)
            return list(kept)
        return run


class EmptyReason(OnnxRuntime):
    def unsupported_reason(self, node):
        return ""


class Choosing(OnnxRuntime):
    """Every artifact that is compiled after the first is right."""

    compiled = 0

    def compile(self, graph, path, **options):
        made = super().compile(graph, path, **options)
        path.with_name("choice").write_text("wrong" if not Choosing.compiled else "right")
        Choosing.compiled += 1
        return made

    def load(self, artifact):
        runner = super().load(artifact)
        off = artifact.path.with_name("choice").read_text() == "wrong"
        return lambda inputs: [t + off for t in runner(inputs)]


class Aborting(OnnxRuntime):
    def load(self, artifact):
        atexit.register(os.abort)
        return super().load(artifact)
'''


@pytest.fixture
def make_outcome(tmp_path, monkeypatch):
    """Return a function that runs a relu on a target, for its outcome and its reproducer."""
    (tmp_path / "faulty_findings.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, verdict=None):
        profile = replace(PROFILES["quick"], share_of_artifacts=0.0)
        suite = Suite(REGISTRY, load_target(f"faulty_findings:{name}", REGISTRY), profile, tmp_path)
        runs = [CaseRun("one", (torch.rand(2, 3),)), CaseRun("two", (torch.rand(2, 3),))]
        case = GraphCase("relu", build_call_graph(REGISTRY.operators["relu"], [runs[0].inputs[0]], {}), runs)
        outcome = run_check(Check("row", lambda: replace(run_case(case, suite), name="row")))
        if verdict is not None:
            outcome = replace(outcome, comparison=Comparison(verdict, "it was"))
        return outcome, tmp_path / write_reproducer(outcome, TASK, suite, f"faulty_findings:{name}", tmp_path)

    yield make
    atexit.unregister(os.abort)
    sys.modules.pop("faulty_findings", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "message"),
    [
        ("Widening", Verdict.CONTRACT, "fail:contract: the target set another default dtype in this process"),
        ("Reusing", Verdict.CONTRACT, "a later run changed the outputs of an earlier one"),
        ("EmptyReason", Verdict.CONTRACT, "fail:contract: unsupported_reason("),
        ("Choosing", Verdict.VALUE, "elements are wrong"),
    ],
)
def test_repro_script_repeats_finding(make_outcome, tmp_path, name, verdict, message):
    """The script of a finding reports it again, as does replay."""
    outcome, path = make_outcome(name)
    assert outcome.verdict is verdict, outcome.comparison
    if name != "Choosing":  # what it compiles now is right
        assert replay(path, REGISTRY, f"faulty_findings:{name}").verdict is verdict
    done = run_script(path, tmp_path)
    assert (done.returncode, message in done.stdout) == (1, True), done.stdout + done.stderr


@pytest.mark.slow
def test_repro_script_abort_at_exit_still_agrees(make_outcome, tmp_path):
    """A runtime that dies as its process ends still agrees."""
    done = run_script(make_outcome("Aborting", Verdict.VALUE)[1], tmp_path)
    assert (done.returncode, "the target agrees" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
def test_repro_script_import_error_exits_2(make_outcome, tmp_path, monkeypatch):
    """A target that cannot be imported is not tried."""
    path = make_outcome("Aborting", Verdict.VALUE)[1]
    monkeypatch.setenv("BROKEN", "1")
    done = run_script(path, tmp_path)
    assert (done.returncode, done.stderr) == (2, ""), done
    assert "cannot run the case: ImportError: libruntime.so.10" in done.stdout


@pytest.mark.slow
def test_replay_artifact_finding_runs_in_other_process(tmp_path):
    """A finding about an artifact is replayed in another process."""
    suite = Suite(REGISTRY, REGISTRY.targets["onnxruntime"], PROFILES["quick"], tmp_path)
    x = torch.rand(2, 3)
    case = GraphCase("relu", build_call_graph(REGISTRY.operators["relu"], [x], {}), [CaseRun("one", (x,))])
    outcome = Outcome("relu-1", Comparison(Verdict.VALUE, "off"), "one", case)
    path = tmp_path / "case.zip"
    task = Task("artifacts", "relu", "float32")
    path.write_bytes(make_reproducer(outcome, task, suite, "onnxruntime"))
    assert replay(path, REGISTRY).verdict is Verdict.PASS
