"""Descriptions of the difference between two results."""

import math

import pytest
import torch

from clika_ref.core.comparison import describe_difference, describe_differences

ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        (3, 4, "4 instead of 3"),
        (ONE, 1.0, "1.0 instead of a tensor"),
        (ONE, ONE.double(), "torch.float64[2] instead of torch.float32[2]"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements differ"),
        (ONE, torch.tensor([1.0, math.nan]), "NaN or infinity at different positions"),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), "NaN or infinity at different positions"),
        (ONE, torch.tensor([1.0, 2.0]), "off by 1, with a largest element of 1 (8388608 roundings)"),
    ],
)
def test_describe_difference_of_unequal_results_names_it(expected, actual, text):
    assert describe_difference(expected, actual, 1024) == text


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_describe_difference_of_half_complex_compares_parts():
    x = torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex32)
    assert describe_difference(x, x.clone()) is None
    assert "off by 1" in str(describe_difference(x, torch.tensor([1 + 2j, 3 - 2j]).to(torch.complex32), 16))


def test_describe_differences_omits_equal_results():
    assert describe_differences([1, ONE, 2], [1, ONE, 3]) == {2: "3 instead of 2"}
