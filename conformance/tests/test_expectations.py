"""The arrays in a reproducer give the verdict of the judge, without the judge."""

import math

import pytest
import torch
from case_references import round_to_tf32
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.reproducing.expectations import make_expectation
from clika_ref_conformance.reproducing.repro_script import describe_difference
from clika_ref_conformance.reproducing.tensors import elements_of, layout_of
from clika_ref_conformance.verdicts import Verdict

from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry

OPERATORS = load_registry().operators
X = torch.tensor([[1.5, -2.0, 0.0, 80.0, math.inf, math.nan, -1e30, 3e38]])


def decide_by_script(reference, actual, *, coarse=False):
    """Return the verdict of a reproducer's script on an output."""
    (expected,) = reference.expected
    stored = {"output": elements_of(expected.eager), **make_expectation(expected, coarse=coarse)}
    return describe_difference(layout_of(expected.eager.contiguous()), actual, stored)


@pytest.mark.parametrize("name", ["exp", "floor", "tanh", "square"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -7.25, 3.4e38])
def test_describe_difference_agrees_with_judge_per_element(name, value):
    """The script and the judge agree on every element."""
    graph = build_call_graph(OPERATORS[name], [X], {})
    reference = CaseReference(graph, [X])
    assert decide_by_script(reference, reference.eager[0]) == ""
    for index in range(X.numel()):
        actual = reference.eager[0].clone()
        actual[0, index] = value
        assert (decide_by_script(reference, actual) == "") is not reference.judge([actual]).verdict.is_failure


@pytest.mark.parametrize("ulps", [1, 4, 100])
def test_describe_difference_agrees_with_judge_on_ulps(ulps):
    """The script and the judge agree on errors of any size."""
    x = torch.rand(50, generator=torch.Generator().manual_seed(0))
    reference = CaseReference(build_call_graph(OPERATORS["exp"], [x], {}), [x])
    actual = reference.eager[0] * (1 + ulps * torch.finfo(torch.float32).eps)
    assert (decide_by_script(reference, actual) == "") is not reference.judge([actual]).verdict.is_failure
    assert (decide_by_script(reference, actual) == "") is (ulps == 1)


def test_describe_difference_integers_must_be_equal():
    """Integers must be equal."""
    x = torch.tensor([1, 2, 3])
    reference = CaseReference(build_call_graph(OPERATORS["neg"], [x], {}), [x])
    assert decide_by_script(reference, -x) == ""
    assert "is -2 at [2], eager has -3" in decide_by_script(reference, torch.tensor([-1, -2, -2]))
    assert decide_by_script(reference, torch.tensor([-1.0, -2.0, -3.0])) == "is float32[3] instead of int64[3]"


def test_describe_difference_coarse_mean_error_found():
    """The script finds errors that are too large only in the mean."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 1024, generator=generator), torch.randn(1024, 16, generator=generator)
    reference = CaseReference(build_call_graph(OPERATORS["matmul"], [a, b], {}), [a, b])
    coarse = round_to_tf32(a) @ round_to_tf32(b)
    assert reference.judge([coarse]).verdict is Verdict.PRECISION
    assert "has an RMS error of" in decide_by_script(reference, coarse, coarse=True)
    assert decide_by_script(reference, reference.eager[0], coarse=True) == ""


def test_make_expectation_returned_parameter_works():
    """A parameter that is returned can be written."""
    graph = Graph()
    graph.add_output(graph.add_constant(torch.nn.Parameter(torch.ones(2)), "weight"))
    reference = CaseReference(graph, [])
    assert decide_by_script(reference, torch.ones(2)) == ""
    assert decide_by_script(reference, torch.zeros(2))
