"""Level neighborhoods: a runtime that changes the precision of a float call is found."""

import clika_ref_onnxruntime.target
import pytest
import torch
from clika_ref_conformance.cases import Task
from clika_ref_conformance.drawing.calls.covering import draw_covering_calls
from clika_ref_conformance.drawing.quantized.neighborhoods import NEIGHBORHOODS, make_neighborhood_cases
from clika_ref_conformance.levels import neighborhoods
from clika_ref_conformance.profiles import Profile
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from clika_ref_onnxruntime.target import BASIC, EXTENDED, OnnxRuntime

from clika_ref.core.registry import load_registry

REGISTRY = load_registry()

OPERATORS = ("conv2d", "conv_transpose2d", "linear", "softmax", "add", "max_pool2d", "permute")


def run_checks(operator, target, folder):
    suite = Suite(REGISTRY, target, Profile("small"), folder)
    found = [check.run() for check in neighborhoods.checks(Task("neighborhoods", operator, "float32"), suite)]
    return {outcome.name: outcome for outcome in found if not outcome.name.startswith("pack")}


def test_neighborhoods_tasks_exclude_random_and_qdq_operators(tmp_path):
    """Each deterministic operator on float32 is a task, except those that quantize."""
    suite = Suite(REGISTRY, OnnxRuntime(), Profile("small"), tmp_path)
    subjects = {task.subject for task in neighborhoods.tasks(suite)}
    assert {"conv2d", "softmax", "cat"} <= subjects
    assert not subjects & {"quantize", "dequantize", "rand_like", "bitwise_and"}


def test_neighborhoods_target_without_scheme_has_no_tasks(tmp_path):
    """A target that computes in float has no neighborhoods."""
    assert not neighborhoods.tasks(Suite(REGISTRY, Identity(), Profile("small"), tmp_path))


@pytest.mark.parametrize("target", [OnnxRuntime(), EXTENDED, BASIC, Identity()], ids=lambda target: target.name)
@pytest.mark.parametrize("operator", OPERATORS)
def test_neighborhoods_correct_targets_pass(operator, target, tmp_path):
    """Eager passes, and so does ONNX Runtime at each optimization level."""
    found = run_checks(operator, target, tmp_path)
    assert {name.partition("-int8")[0].partition("-float")[0] for name in found} >= {"call-0", "call-1"}
    bad = [(name, outcome.comparison.message) for name, outcome in found.items() if outcome.verdict != Verdict.PASS]
    assert not bad


@pytest.mark.parametrize("operator", ["conv2d", "softmax"])
def test_neighborhoods_changed_precision_fails(operator, tmp_path, monkeypatch):
    """Without barriers against fusion, ONNX Runtime runs float calls in INT8, and fails."""
    monkeypatch.setattr(clika_ref_onnxruntime.target, "prevent_fusion", lambda model, float_islands: None)
    found = run_checks(operator, OnnxRuntime(), tmp_path)
    failed = {name for name, outcome in found.items() if outcome.verdict is Verdict.VALUE}
    assert failed
    assert all(name.endswith("int8") and "float" not in name for name in failed)


def test_make_neighborhood_cases_have_each_neighborhood():
    """A call has a graph for each neighborhood; its weights are constants, and moved elements keep their scale."""
    for name, constants in (("conv2d", True), ("permute", False)):
        op = REGISTRY.operators[name]
        (drawn, *_) = draw_covering_calls(op, torch.float32, 0, 1)
        cases = list(make_neighborhood_cases(op, drawn.call, "call", REGISTRY, 0))
        assert [case.facts["neighborhood"] for case in cases] == [n.name for n in NEIGHBORHOODS]
        assert all(bool(case.graph.constants) == constants for case in cases)
    between = next(case for case in cases if case.facts["neighborhood"] == "int8-int8")
    scales = {node.inputs[1] for node in between.graph.nodes if node.op_type == "quantize"}
    assert len(scales) == 1
