"""Qparams: covered ranges, an exact 0, and no overflow, for floats of any size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.calibration.observers import Range
from clika_ref.quantization.qdq.qparams import (
    MIN_SCALE,
    QParams,
    compute_qparams,
    compute_weight_scales,
    quantize_bias,
    raise_scales_for_bias,
)

U8 = QuantizedType()
S8 = QuantizedType(is_signed=True, is_symmetric=True)
NARROW = QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True)
S7 = QuantizedType(bits=7, is_signed=True, is_symmetric=True)

BOUNDS = st.floats(min_value=0, max_value=2.0**100, width=32, allow_subnormal=False)


def test_quantized_type_low_and_high():
    """Each type has the min and max of its bits."""
    ends = {
        kind: (kind.low, kind.high)
        for kind in (U8, S8, NARROW, S7, QuantizedType(bits=4), QuantizedType(4, is_signed=True))
    }
    assert [*ends.values()] == [(0, 255), (-128, 127), (-127, 127), (-64, 63), (0, 15), (-8, 7)]


@given(below=BOUNDS, above=BOUNDS, kind=st.sampled_from([U8, S8, NARROW, QuantizedType(is_signed=True)]))
def test_compute_qparams_covers_range_and_exact_zero(below, above, kind):
    """A range is covered within half a step, and zero is exact."""
    found = compute_qparams(Range(-below, above), kind)
    assert kind.low <= found.zero_point <= kind.high
    assert math.isfinite(found.scale)
    assert found.scale >= MIN_SCALE
    low, high = ((end - found.zero_point) * found.scale for end in (kind.low, kind.high))
    slack = found.scale * (0.5 + 1e-4)  # the zero point is a whole number, the scale a float32
    if not Range(-below, above).is_point:
        assert low <= -below + slack
        assert high >= above - slack


def test_compute_qparams_one_sided_range_uses_all_steps():
    """A one-sided range uses all steps, with its zero point at the end."""
    assert compute_qparams(Range(0, 2.55), U8).zero_point == 0
    assert compute_qparams(Range(0, 2.55), U8).scale == pytest.approx(0.01)
    assert compute_qparams(Range(-2.55, 0), U8).zero_point == 255
    assert compute_qparams(Range(-1, 2.54), S8) == compute_qparams(Range(-2.54, 1), S8)


def test_compute_qparams_symmetric_unsigned_zero_point():
    """A symmetric unsigned type has its zero point in the middle for negative values."""
    kind = QuantizedType(is_symmetric=True)
    assert compute_qparams(Range(-1.0, 2.54), kind) == QParams(pytest.approx(0.02), 128)
    assert compute_qparams(Range(0.0, 2.55), kind) == QParams(pytest.approx(0.01), 0)


def test_compute_qparams_zero_range_has_scale_one():
    """A range of zero has scale one."""
    assert [(s.scale, s.zero_point) for s in (compute_qparams(Range(0, 0), U8), compute_qparams(Range(0, 0), S8))] == [
        (1.0, 0)
    ] * 2


def test_compute_weight_scales_per_channel_of_axis():
    """A weight has a scale for each channel along an axis, or one in total."""
    weight = torch.tensor([[1.0, -2.0, 0.0], [0.5, 12.7, 0.0]])
    assert compute_weight_scales(weight, 0, S8).tolist() == pytest.approx([2 / 127, 0.1])
    assert compute_weight_scales(weight, -1, S8).tolist() == pytest.approx([1 / 127, 0.1, 1.0])
    assert compute_weight_scales(weight, None, S8).item() == pytest.approx(0.1)
    assert compute_weight_scales(weight, 0, S7).tolist() == pytest.approx([2 / 63, 12.7 / 63])
    assert compute_weight_scales(torch.full((2, 1), 1e-42), 0, S8).tolist() == [MIN_SCALE] * 2


@given(
    bias=st.lists(st.floats(min_value=-1e6, max_value=1e6, width=32, allow_subnormal=False), min_size=1, max_size=4),
    input_scale=st.floats(min_value=2.0**-26, max_value=1, width=32),
    weight_scale=st.floats(min_value=2.0**-26, max_value=1, width=32),
)
def test_raise_scales_for_bias_prevents_overflow(bias, input_scale, weight_scale):
    """No bias overflows, and scales are raised only as far as needed."""
    scales = torch.full((len(bias),), weight_scale)
    raised = raise_scales_for_bias(scales, torch.tensor(bias), input_scale)
    integers, own = quantize_bias(torch.tensor(bias), input_scale, raised)
    assert (raised >= scales).all()
    assert torch.equal(own, torch.tensor(input_scale) * raised)
    missed = (integers.double() * own.double() - torch.tensor(bias).double()).abs()
    assert (missed <= own.double() * 0.5000001).all()
    assert ((raised == scales) | (integers.abs() > 2**31 - 1024)).all()


@pytest.mark.parametrize("row_length", [1, 27, 4608, 60_000, 100_000])
def test_raise_scales_for_bias_leaves_room_for_row(row_length):
    """The bias and all products of a row fit into INT32 together; very long rows leave a bias of 2**24 steps."""
    raised = raise_scales_for_bias(torch.tensor([1e-12]), torch.tensor([2.0]), 0.01, row_length)
    steps, _ = quantize_bias(torch.tensor([2.0]), 0.01, raised)
    limit = max(2**31 - 255 * 128 * row_length, 2**24)
    assert 0.999 * limit < int(steps) <= limit


def test_raise_scales_for_bias_single_scale_fits_largest():
    """A single scale is raised for the largest bias."""
    raised = raise_scales_for_bias(torch.tensor(2.0**-20), torch.tensor([1.0, -4e6, 0.0]), 2.0**-20)
    integers, own = quantize_bias(torch.tensor([1.0, -4e6, 0.0]), 2.0**-20, raised)
    assert raised.shape == own.shape == ()
    assert -(2**31) < int(integers.min()) < -(2**31) + 2048
