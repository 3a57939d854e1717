"""Failures of whole checks, rather than single graphs, are repeated from their zip."""

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
from sampled_operators import find_check, shift
from small_cases import run_script
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry

REGISTRY = load_registry()
PROFILE = replace(PROFILES["quick"], seed=3)

LENIENT = '''
"""ONNX Runtime with other errors for artifacts that it cannot read."""
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
def identity_op(x: Tensor) -> Tensor:
    return x


def add_to_registry(op):
    return replace(REGISTRY, operators={**REGISTRY.operators, op.name: op})


def write_reproducer_of(level, task, check, suite, target):
    """Run one check, which fails, and return its reproducer."""
    outcome = find_check(level.checks(task, suite), check).run()
    assert outcome.verdict.is_failure, outcome
    return suite.folder / write_reproducer(outcome, task, suite, target, suite.folder)


@pytest.fixture
def lenient_reproducer(tmp_path, monkeypatch):
    """The reproducer of a cut file that is loaded all the same, and the module of the target that does so."""
    (tmp_path / "lenient_target.py").write_text(LENIENT)
    monkeypatch.syspath_prepend(tmp_path)
    name = "lenient_target:TARGET"
    suite = make_suite(WorkerSetup(name, PROFILE, {}, str(tmp_path), path=tuple(sys.path)))
    yield write_reproducer_of(artifacts, Task("artifacts", "files"), "damaged-2", suite, name)
    sys.modules.pop("lenient_target", None)


def test_replay_declaration_check_uses_current_declaration(tmp_path):
    """A finding about a declaration is replayed on the declaration."""
    suite = Suite(add_to_registry(identity_op), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    path = write_reproducer_of(contract, Task("contract", "identity_op"), "schema", suite, "onnxruntime")
    again = replay(path, add_to_registry(identity_op))
    assert (again.verdict, again.name) == (Verdict.CONTRACT, "schema")
    assert again.comparison.message == "identity_op has no docstring. Describe its result."
    identity_op.reference.__doc__ = "``x``."
    try:
        assert replay(path, add_to_registry(identity_op)).verdict is Verdict.PASS
    finally:
        identity_op.reference.__doc__ = None


def test_replay_missing_operator_reports_planning_error(tmp_path):
    """A finding about a removed declaration reports so."""
    suite = Suite(add_to_registry(identity_op), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    path = write_reproducer_of(contract, Task("contract", "identity_op"), "samples", suite, "onnxruntime")
    again = replay(path, add_to_registry(shift))
    assert again.verdict is Verdict.CONTRACT
    assert "planning the task failed" in again.comparison.message
    assert "KeyError: 'identity_op'" in again.comparison.message


@pytest.mark.slow
def test_replay_damaged_artifact_repeats_in_script(lenient_reproducer, tmp_path):
    """A finding about a damaged artifact repeats by replay and by its script."""
    again = replay(lenient_reproducer, REGISTRY, "lenient_target:TARGET")
    assert (again.verdict, again.name) == (Verdict.ARTIFACT, "damaged-2")
    assert "but the target loads and runs it without an error" in again.comparison.message
    assert replay(lenient_reproducer, REGISTRY, "lenient_target:RIGHT").verdict is Verdict.PASS
    done = run_script(lenient_reproducer, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail:invalid-artifact: model.onnx" in done.stdout


@pytest.mark.slow
def test_replay_removed_check_not_run(lenient_reproducer, monkeypatch):
    """A check that is no longer planned is not run."""
    monkeypatch.setattr(artifacts, "DAMAGED_COPIES", 1)
    again = replay(lenient_reproducer, REGISTRY, "lenient_target:TARGET")
    assert again.verdict is Verdict.NOT_RUN
    assert again.comparison.message == "the task artifacts/files no longer has the check 'damaged-2'"


def test_replay_unknown_level_raises(tmp_path):
    """A check of an unknown level raises ReportError."""
    suite = Suite(add_to_registry(identity_op), REGISTRY.targets["onnxruntime"], PROFILE, tmp_path)
    outcome = find_check(contract.checks(Task("contract", "identity_op"), suite), "schema").run()
    path = tmp_path / write_reproducer(outcome, Task("faulty", "identity_op"), suite, "onnxruntime", tmp_path)
    with pytest.raises(ReportError, match=r"there is no level 'faulty'. Levels are contract, operators"):
        replay(path, REGISTRY)
