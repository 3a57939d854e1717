"""Histograms count every element, in bins that do not depend on order or on how data is split."""

import math
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN, Histogram

FLOATS = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=30)


def make_histogram(*parts):
    found = Histogram()
    for part in parts:
        found.add(torch.tensor(part, dtype=torch.float32))
    return found


def is_same(one, other):
    return one.exponent == other.exponent and torch.equal(one.counts, other.counts)


@given(FLOATS)
def test_histogram_elements_counted_in_enclosing_bin(elements):
    """Each element is counted in the bin that contains it."""
    found = make_histogram(elements)
    assert found.total == len(elements)
    for x in elements:
        (alone,) = torch.tensor([x], dtype=torch.float32).double().tolist()
        place = math.floor(alone / found.width)
        assert -BINS_PER_SIGN <= place < BINS_PER_SIGN
        assert found.counts[place + BINS_PER_SIGN] > 0


@given(FLOATS, st.randoms(use_true_random=False), st.integers(0, 30))
@example([0.0, 2.0**-100], Random(0), 1)
@example([2.0**-100, 0.0], Random(0), 1)
def test_histogram_independent_of_order_and_split(elements, random, cut):
    """Neither the order nor the split of the data changes a histogram."""
    shuffled = random.sample(elements, len(elements))
    whole = make_histogram(elements)
    assert is_same(whole, make_histogram(shuffled[:cut], shuffled[cut:]))
    merged = make_histogram(shuffled[:cut])
    merged.merge(make_histogram(shuffled[cut:]))
    assert is_same(whole, merged)


def test_histogram_bin_width_follows_largest_element():
    """The bins are as narrow as the largest element allows."""
    found = make_histogram([1.0, -3.99])
    assert found.width == 4.0 / BINS_PER_SIGN
    found.add(torch.tensor([4.0]))
    assert found.width == 8.0 / BINS_PER_SIGN


def test_histogram_quantile_upper_edge_of_bin():
    """A quantile is the upper edge of the bin that reaches it."""
    found = make_histogram(list(range(1, 101)))
    assert found.quantile(1.0) == pytest.approx(100, abs=found.width)
    assert found.quantile(0.5) == pytest.approx(50, abs=found.width)
    assert found.quantile(0.5) > 50


def test_histogram_centers_in_middle_of_bins():
    """The centers are in the middle of the bins."""
    found = make_histogram([-1.5, 1.5])
    occupied = found.centers[found.counts > 0]
    assert occupied.tolist() == [-1.5 + found.width / 2, 1.5 + found.width / 2]


def test_histogram_counts_zeros_and_subnormals():
    """Zeros and subnormal numbers are counted."""
    found = make_histogram([0.0, -0.0, 2.0**-149, -(2.0**-149)])
    assert found.total == 4
    assert found.counts[BINS_PER_SIGN] == 2
    assert found.counts[BINS_PER_SIGN + 1] == 1
    assert found.counts[BINS_PER_SIGN - 1] == 1


def test_histogram_on_cpu_with_other_default_device():
    """The counts are on the CPU with any default device."""
    with torch.device("meta"):  # in which nothing can be looked at
        found = Histogram()
        for elements in ([1.0, -2.0], [300.0]):
            found.add(torch.tensor(elements, device="cpu"))
        assert found.quantile(1.0) >= 300
        assert found.centers.device == found.counts.device == torch.device("cpu")
