"""Blocks of real architectures: reproducible weights, and comparison of the captured block with eager."""

import pytest
import torch
from clika_ref_conformance.blocks.block import BlockSpec, make_normal_inputs
from clika_ref_conformance.levels import blocks
from clika_ref_conformance.levels.blocks import BLOCK_BY_NAME, compare_top1
from clika_ref_conformance.verdicts import Verdict
from faulty_targets import Negating, PartialTarget
from small_cases import make_suite_without_fault

from clika_ref.core.registry import load_registry

REGISTRY = load_registry()


def test_blocks_tasks_list_each_block_static_and_dynamic(tmp_path):
    """Each block has a static and a dynamic task; only classifiers have a top-1 check."""
    tasks = blocks.tasks(make_suite_without_fault(tmp_path))
    assert len(tasks) == 2 * len(BLOCK_BY_NAME)
    assert len(BLOCK_BY_NAME) >= 14
    for task in tasks:
        names = [c.name for c in blocks.checks(task, make_suite_without_fault(tmp_path))]
        assert names == ["captured", "exported", *["top-1"] * BLOCK_BY_NAME[task.subject].chooses]


@pytest.mark.parametrize("name", BLOCK_BY_NAME)
def test_block_weights_and_inputs_repeat(name):
    """A block has the same weights and inputs each time."""
    block = BLOCK_BY_NAME[name]
    one, two = block.build(), block.build()
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    for batch in (1, 3):
        first, second = (block.inputs(batch, torch.Generator().manual_seed(5)) for _ in range(2))
        assert all(torch.equal(a, b) and len(a) == batch for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["detection-head", "gqa-rotary-cache", "expert-gate"])
def test_blocks_identity_dynamic_batch_passes(tmp_path, name):
    """Eager itself passes with a dynamic batch."""
    (task,) = [t for t in blocks.tasks(make_suite_without_fault(tmp_path)) if t.subject == name and t.dynamic]
    for check in blocks.checks(task, make_suite_without_fault(tmp_path)):
        found = check.run()
        assert found.verdict is Verdict.PASS, f"{check.name}: {found.comparison.message}"


def test_blocks_failure_reduces_to_failing_nodes(tmp_path):
    """A block that fails is reduced to the nodes that fail."""
    task = blocks.tasks(make_suite_without_fault(tmp_path))[1]
    assert (task.subject, task.dynamic) == ("resnet-basic", True)
    captured, exported = blocks.checks(task, make_suite_without_fault(tmp_path, Negating("conv2d")))
    assert captured.run().verdict is Verdict.PASS
    found = exported.run()
    assert found.verdict is Verdict.VALUE
    assert [n.op_type for n in found.case.graph.nodes] == ["conv2d"]
    assert not found.case.graph.symbols, "it fails at fixed sizes as well"


def test_blocks_wrong_top1_counted(tmp_path, monkeypatch):
    """Wrong top-1 choices are counted."""
    block = BlockSpec("classes", lambda: torch.nn.Linear(6, 4), make_normal_inputs(6), chooses=True)
    monkeypatch.setitem(BLOCK_BY_NAME, "classes", block)
    task = blocks.tasks(make_suite_without_fault(tmp_path))[-2]
    assert task.subject == "classes"
    *_, right = blocks.checks(task, make_suite_without_fault(tmp_path))
    assert right.run().comparison.message == "96 of 96 best classes are those of exact arithmetic"
    *_, wrong = blocks.checks(task, make_suite_without_fault(tmp_path, Negating("linear")))
    found = wrong.run()
    assert found.verdict is Verdict.VALUE
    assert "96 of the others lead by more than 40 times eager's error" in found.comparison.message


def test_compare_top1_tie_within_rounding_passes():
    """A choice that rounding decides is not a mistake."""
    exact = torch.tensor([[1.0, 1.0 + 1e-9], [0.0, 1.0]], dtype=torch.float64)
    eager = exact.float()
    found = compare_top1(eager, exact, torch.tensor([[2.0, 1.0], [0.0, 1.0]]))
    assert found.verdict is Verdict.PASS
    assert found.message == "1 of 2 best classes are those of exact arithmetic"
    assert compare_top1(eager, exact, torch.tensor([[1.0, 2.0], [1.0, 0.0]])).verdict is Verdict.VALUE


def test_check_capture_changed_graph_fails(tmp_path):
    """A graph that differs from the module is reported."""
    trial = blocks.BlockChecks(BLOCK_BY_NAME["llama-mlp"], make_suite_without_fault(tmp_path), dynamic=False)
    for node in trial.graph.nodes:
        if node.op_type == "silu":
            node.op = REGISTRY.operators["sigmoid"]
    found = trial.check_capture()
    assert found.verdict is Verdict.VALUE
    assert found.run == "batch-3-0"
    assert found.case is None, "what is replayed is the check: no target has failed"


def test_blocks_unsupported_block_skips_top1(tmp_path):
    """The top-1 choices of an unsupported block are not counted."""
    one = make_suite_without_fault(tmp_path, PartialTarget())
    (task,) = [t for t in blocks.tasks(one) if t.subject == "text-classifier" and not t.dynamic]
    found = {check.name: check.run() for check in blocks.checks(task, one)}
    assert found["captured"].verdict is Verdict.PASS
    assert found["top-1"].verdict is Verdict.UNSUPPORTED
    assert found["top-1"].comparison.message.endswith(": only relu so far")
