"""Findings that no graph alone shows are repeated as the checks that they came of, from their zip."""

import sys
from dataclasses import replace

import pytest
from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.worker import make_suite
from clika_ref_conformance.levels import artifacts, contract
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.reporting.replay import replay
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.reproducing.reproducers import write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Verdict
from sampled_operators import named, shift
from small_cases import run_script
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry

REGISTRY = load_registry()
PROFILE = replace(PROFILES["quick"], seed=3)

LENIENT = '''
"""ONNX Runtime, but for what it makes of artifacts that it cannot read."""
import torch
from clika_ref_onnxruntime.target import OnnxRuntime

RIGHT = OnnxRuntime()


class Lenient(OnnxRuntime):
    def load(self, artifact):
        try:
            return super().load(artifact)
        except Exception:
            return lambda inputs: [torch.zeros(3, 50)]


TARGET = Lenient()
'''


@operator()
def silent(x: Tensor) -> Tensor:
    return x


def registry_of(op):
    return replace(REGISTRY, operators={**REGISTRY.operators, op.name: op})


def written(level, task, check, suite, target):
    """Run one check, which fails, and return its reproducer."""
    outcome = named(level.checks(task, suite), check).run()
    assert outcome.verdict.is_failure, outcome
    return suite.folder / write_reproducer(outcome, task, suite, target, suite.folder)


@pytest.fixture
def lenient(tmp_path, monkeypatch):
    """The reproducer of a cut file that is loaded all the same, and the module of the target that does so."""
    (tmp_path / "lenient_target.py").write_text(LENIENT)
    monkeypatch.syspath_prepend(tmp_path)
    name = "lenient_target:TARGET"
    suite = make_suite(WorkerSetup(name, PROFILE, {}, str(tmp_path), path=tuple(sys.path)))
    yield written(artifacts, Task("artifacts", "files"), "damaged-2", suite, name)
    sys.modules.pop("lenient_target", None)


def test_a_finding_about_a_declaration_replays_on_the_declaration(tmp_path):
    suite = Suite(registry_of(silent), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    path = written(contract, Task("contract", "silent"), "schema", suite, "onnxruntime")
    again = replay(path, registry_of(silent))
    assert (again.verdict, again.name) == (Verdict.CONTRACT, "schema")
    assert again.comparison.message == "silent has no docstring that says what it computes"
    silent.reference.__doc__ = "``x``."
    try:
        assert replay(path, registry_of(silent)).verdict is Verdict.PASS
    finally:
        silent.reference.__doc__ = None


def test_a_finding_about_a_declaration_that_nobody_makes_any_more_says_so(tmp_path):
    suite = Suite(registry_of(silent), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    path = written(contract, Task("contract", "silent"), "samples", suite, "onnxruntime")
    again = replay(path, registry_of(shift))
    assert again.verdict is Verdict.CONTRACT
    assert "planning the task failed" in again.comparison.message
    assert "KeyError: 'silent'" in again.comparison.message


@pytest.mark.slow
def test_a_finding_about_a_damaged_artifact_replays_here_and_from_its_script(lenient, tmp_path):
    again = replay(lenient, REGISTRY, "lenient_target:TARGET")
    assert (again.verdict, again.name) == (Verdict.ARTIFACT, "damaged-2")
    assert "it is loaded and run as if it were whole" in again.comparison.message
    assert replay(lenient, REGISTRY, "lenient_target:RIGHT").verdict is Verdict.PASS
    done = run_script(lenient, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail:invalid-artifact: model.onnx" in done.stdout


@pytest.mark.slow
def test_a_check_that_is_no_longer_planned_is_not_run(lenient, monkeypatch):
    monkeypatch.setattr(artifacts, "DAMAGED_COPIES", 1)
    again = replay(lenient, REGISTRY, "lenient_target:TARGET")
    assert again.verdict is Verdict.NOT_RUN
    assert again.comparison.message == "the task artifacts/files has no check 'damaged-2' any more"


def test_a_check_of_a_level_that_the_suite_does_not_have_is_refused(tmp_path):
    suite = Suite(registry_of(silent), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    outcome = named(contract.checks(Task("contract", "silent"), suite), "schema").run()
    path = tmp_path / write_reproducer(outcome, Task("odd", "silent"), suite, "onnxruntime", tmp_path)
    with pytest.raises(ReportError, match=r"repeats a check of the level 'odd'; levels are contract, operators"):
        replay(path, REGISTRY)
