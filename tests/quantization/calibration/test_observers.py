"""Observers choose ranges from statistics: their coverage, and the one with the least error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded_tensors import randn

from clika_ref.quantization.calibration.observers import (
    OBSERVERS,
    Range,
    least_error,
    mean_min_max,
    min_max,
    percentile,
    quantization_error,
)
from clika_ref.quantization.calibration.statistics import MAX_SAMPLED_ELEMENTS, Statistics, measure_tensor


def measure(*batches):
    found = Statistics()
    for batch in batches:
        found.add(measure_tensor(torch.as_tensor(batch, dtype=torch.float32)))
    return found


def make_normal_samples(count=MAX_SAMPLED_ELEMENTS, seed=0):
    return randn(count, seed=seed)


def exact_error(x, chosen, levels=256):
    scale = (chosen.high - chosen.low) / (levels - 1)
    zero_point = round(-chosen.low / scale)
    return float((torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, levels - 1) - x).square().mean())


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_range_always_contains_zero(low, high):
    """Every range contains zero."""
    chosen = Range(low, high)
    assert chosen.low <= 0 <= chosen.high


def test_min_max_and_mean_min_max():
    """`min_max` covers all elements, `mean_min_max` the mean of the batches."""
    found = measure([-1.0, 3.0], [-3.0, 1.0])
    assert min_max(found) == Range(-3.0, 3.0)
    assert mean_min_max(found) == Range(-2.0, 2.0)


def test_percentile_clips_both_tails_within_min_max():
    """A percentile clips both tails equally and stays within min/max."""
    found = measure(torch.linspace(-1, 1, MAX_SAMPLED_ELEMENTS))
    chosen = percentile(found, share=0.9)
    assert chosen.low == pytest.approx(-0.9, abs=0.002)
    assert chosen.high == pytest.approx(0.9, abs=0.002)
    assert percentile(found, share=1.0) == min_max(found)


def test_mse_observer_clips_outliers_if_error_falls():
    """The MSE observer clips outliers only if the error falls."""
    outlier = torch.cat([make_normal_samples(MAX_SAMPLED_ELEMENTS - 1) * 0.1, torch.tensor([20.0])])
    found = measure(outlier)
    chosen = least_error(found, levels=16)
    assert chosen.high < 20.0
    assert exact_error(outlier, chosen, 16) < exact_error(outlier, min_max(found), 16)
    flat = measure(torch.linspace(-1, 1, MAX_SAMPLED_ELEMENTS))
    assert least_error(flat).high == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("shape", ["normal", "one side", "far from zero"])
def test_quantization_error_close_to_exact_error(shape):
    """The estimated error of a range is close to the exact one."""
    x = {
        "normal": make_normal_samples(),
        "one side": make_normal_samples().abs(),
        "far from zero": make_normal_samples() + 8,
    }[shape]
    found = measure(x)
    for choose in OBSERVERS.values():
        chosen = choose(found)
        assert quantization_error(found, chosen) == pytest.approx(exact_error(x, chosen), rel=0.1)


def test_mse_observer_not_worse_than_other_observers():
    """The MSE observer has the smallest error of all observers."""
    for seed, power in enumerate((1, 2, 3, 5)):
        found = measure(make_normal_samples(seed=seed) ** power)
        errors = {name: quantization_error(found, choose(found)) for name, choose in OBSERVERS.items()}
        assert min(errors.values()) == pytest.approx(errors["mse"], rel=0.05), (power, errors)


def test_observers_zero_tensor_gives_point_range():
    """A tensor of zeros has a range of one point and no error."""
    found = measure(torch.zeros(5))
    for choose in OBSERVERS.values():
        assert choose(found).is_point
        assert quantization_error(found, choose(found)) < 1e-30
