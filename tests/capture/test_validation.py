"""Runs that violate guards decide which are kept; they are few, and each tests all guards that it violates."""

import pytest
import sympy
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture import importer
from clika_ref.capture.symbols import TracedGuard
from clika_ref.capture.validation import GuardEvidence, ProbeRun
from clika_ref.core.errors import ModelError
from clika_ref.core.symbols import Guard, make_symbol


class LastNorm(nn.LayerNorm):
    """Normalizes the channels of images, as ConvNeXt does; each call causes layout guards on all three dims."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_validation_layout_guards_dropped_for_batch_one(compile_and_compare):
    """A batch of 1 is served in spite of many layout guards."""
    blocks = [nn.Sequential(LastNorm(3), nn.Conv2d(3, 3, 2, stride=2)) for _ in range(4)]
    inputs = [torch.randn(2, 3, 64, 64), torch.randn(3, 3, 96, 128)]
    module = compile_and_compare(nn.Sequential(*blocks), inputs, [torch.randn(1, 3, 64, 64)])
    with pytest.raises(ModelError, match=r"input_2 = 8 .* violates .*input_2"):  # too short for eager too
        module(torch.randn(1, 3, 8, 64))


def test_validation_joint_guards_dropped_for_batch_one(compile_and_compare):
    """Guards on several inputs are tested by one run with all of them."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    three, five, one = (tuple(torch.randn(3, b, n, 8)) for b, n in ((2, 3), (3, 5), (1, 4)))
    module = compile_and_compare(attention, [three, five], [one])
    with pytest.raises(ModelError, match="violates"):
        module(one[0], three[0], three[0])


def test_guard_evidence_tests_violated_guards_once():
    """One run tests all guards that it violates, and a failed run is not repeated."""
    a = make_symbol("a")
    low, two, other = (TracedGuard(Guard(g, ""), is_testable=True) for g in (a > 1, a > 2, sympy.Ne(a, 3)))
    evidence = GuardEvidence([ProbeRun([low, two], agreed=True, is_complete=True)])
    assert evidence.idle([low, two, other]) == [low, two]
    assert evidence.is_run_useful([low, two])
    evidence.runs += [
        ProbeRun([two], agreed=False, is_complete=True),
        ProbeRun([two, other], agreed=True, is_complete=True),
    ]
    assert not evidence.is_run_useful([two]), "it was tested alone"
    assert evidence.idle([low, two, other]) == [low, other], "no other guard excludes what disagreed"
    evidence.runs.append(ProbeRun([low, two], agreed=False, is_complete=True))
    assert evidence.idle([low, two, other]) == [low, other], "the second one excludes it"
    assert not evidence.is_run_useful([low, two])


def test_guard_evidence_of_bodies_needs_all_branches():
    """A run that leaves out a branch of `torch.cond` shows nothing about guards of bodies."""
    guard = TracedGuard(Guard(make_symbol("a") > 1, ""), is_testable=True, is_from_body=True)
    evidence = GuardEvidence([ProbeRun([guard], agreed=True, is_complete=False)])
    assert evidence.idle([guard]) == []
    evidence.runs.append(ProbeRun([guard], agreed=True, is_complete=True))
    assert evidence.idle([guard]) == [guard]


@pytest.mark.parametrize("sizes", [1, 2], ids=["static", "dynamic"])
def test_validation_wrong_declared_dtype_rejected(monkeypatch, sizes):
    """A graph that declares other types than it computes raises an error, for any input."""

    def infer_input_dtypes(_, __, ___, fakes):
        return [f.dtype for f in fakes]

    def multiply_in_half(x):
        return x.half().mul_(x).float()

    inputs = [torch.ones(2, 4), torch.ones(3, 4)][:sizes]
    clika_compile(multiply_in_half, tracing_inputs=inputs)
    monkeypatch.setattr(importer, "_infer_dtypes", infer_input_dtypes)
    with pytest.raises(
        ModelError, match=r"mul.* returns torch.float32\[[23], 4\], not the type that the graph declares"
    ):
        clika_compile(multiply_in_half, tracing_inputs=inputs)


def test_probes_stay_within_limits_of_operators():
    """No run beyond the 16 million elements that a quantile allows: only lengths of loops are exceeded."""
    lengths = []

    def find_quantile(x):
        lengths.append(x.shape[0])
        return x.quantile(0.3, dim=0)

    clika_compile(find_quantile, tracing_inputs=[torch.rand(3, 4), torch.rand(5, 4)])
    assert max(length for length in lengths if isinstance(length, int)) < 1000
