"""Judgment of a mismatch: comparison with the graph in float64, elementwise where results are not finite."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.export.artifact_check import is_within_rounding


class Halved(nn.Module):
    def forward(self, x):
        return x.half().float() * 2


def accepts_result(found):
    """Return whether the check accepts results for elements; the first overflows in float16, not in float64."""
    x = torch.tensor([[1e5, 1.1, 2.0, 3.0]])
    module = clika_compile(Halved(), tracing_inputs=[torch.rand(1, 4)])
    return is_within_rounding(module.graph, [x], [module(x)], [torch.tensor([found])])


@pytest.mark.parametrize(
    "found",
    [
        [float("inf"), 2.2, 4.0, 6.0],
        [float("inf"), 2.19921875, 4.0, 6.0],
        [2e5, 2.2, 4.0, 6.0],
    ],
    ids=["exact but for what overflows", "as eager", "exact, casts left out"],
)
def test_is_within_rounding_overflow_as_eager_or_exact(found):
    """An element that overflows is right as in eager, and as in float64."""
    assert accepts_result(found)


@pytest.mark.parametrize(
    "found",
    [
        [9e4, -77.0, 55.0, 1e4],
        [float("inf"), 2.2, 4.0, 6.1],
        [9e4, 2.2, 4.0, 6.0],
        [-float("inf"), 2.2, 4.0, 6.0],
        [float("nan"), 2.2, 4.0, 6.0],
        [float("inf"), float("nan"), 4.0, 6.0],
        [float("inf"), float("inf"), 4.0, 6.0],
    ],
)
def test_is_within_rounding_overflow_excuses_no_other(found):
    """One element that overflows does not widen the tolerance of the others."""
    assert not accepts_result(found)


def test_is_within_rounding_nonfinite_must_match_eager():
    """Elements that are not finite in eager must match it."""
    module = clika_compile(torch.log, tracing_inputs=[torch.rand(3)])
    x = torch.tensor([-1.0, 0.0, 1.0])
    assert is_within_rounding(module.graph, [x], [module(x)], [torch.tensor([torch.nan, -torch.inf, 0.0])])
    assert not is_within_rounding(module.graph, [x], [module(x)], [torch.tensor([torch.nan, torch.nan, 0.0])])
    assert not is_within_rounding(module.graph, [x], [module(x)], [torch.tensor([1.0, -torch.inf, 0.0])])
