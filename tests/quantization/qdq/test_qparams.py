"""Scales: what they cover, that 0 is exact, and that nothing overflows; on floats of any size."""

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

ENDS = st.floats(min_value=0, max_value=2.0**100, width=32, allow_subnormal=False)


def test_kinds_of_integers_have_the_ends_of_their_bits():
    ends = {
        kind: (kind.low, kind.high)
        for kind in (U8, S8, NARROW, S7, QuantizedType(bits=4), QuantizedType(4, is_signed=True))
    }
    assert [*ends.values()] == [(0, 255), (-128, 127), (-127, 127), (-64, 63), (0, 15), (-8, 7)]


@given(below=ENDS, above=ENDS, kind=st.sampled_from([U8, S8, NARROW, QuantizedType(is_signed=True)]))
def test_a_range_is_covered_but_for_half_a_step_and_zero_is_exact(below, above, kind):
    found = compute_qparams(Range(-below, above), kind)
    assert kind.low <= found.zero_point <= kind.high
    assert math.isfinite(found.scale)
    assert found.scale >= MIN_SCALE
    low, high = ((end - found.zero_point) * found.scale for end in (kind.low, kind.high))
    slack = found.scale * (0.5 + 1e-4)  # the zero point is a whole number, the scale a float32
    if not Range(-below, above).is_point:
        assert low <= -below + slack
        assert high >= above - slack


def test_what_is_never_negative_has_zero_point_zero_and_all_integers():
    assert compute_qparams(Range(0, 2.55), U8).zero_point == 0
    assert compute_qparams(Range(0, 2.55), U8).scale == pytest.approx(0.01)
    assert compute_qparams(Range(-2.55, 0), U8).zero_point == 255
    assert compute_qparams(Range(-1, 2.54), S8) == compute_qparams(Range(-2.54, 1), S8)


def test_unsigned_integers_that_are_symmetric_have_their_middle_as_zero_point_where_anything_lies_below():
    kind = QuantizedType(is_symmetric=True)
    assert compute_qparams(Range(-1.0, 2.54), kind) == QParams(pytest.approx(0.02), 128)
    assert compute_qparams(Range(0.0, 2.55), kind) == QParams(pytest.approx(0.01), 0)


def test_what_is_always_zero_has_scale_one():
    assert [(s.scale, s.zero_point) for s in (compute_qparams(Range(0, 0), U8), compute_qparams(Range(0, 0), S8))] == [
        (1.0, 0)
    ] * 2


def test_a_weight_has_a_scale_for_each_channel_along_the_side_that_is_asked_for():
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
def test_no_bias_overflows_and_scales_are_raised_no_more_than_that_takes(bias, input_scale, weight_scale):
    scales = torch.full((len(bias),), weight_scale)
    raised = raise_scales_for_bias(scales, torch.tensor(bias), input_scale)
    integers, own = quantize_bias(torch.tensor(bias), input_scale, raised)
    assert (raised >= scales).all()
    assert torch.equal(own, torch.tensor(input_scale) * raised)
    missed = (integers.double() * own.double() - torch.tensor(bias).double()).abs()
    assert (missed <= own.double() * 0.5000001).all()
    assert ((raised == scales) | (integers.abs() > 2**31 - 1024)).all()


def test_one_scale_in_all_is_raised_for_the_largest_bias():
    raised = raise_scales_for_bias(torch.tensor(2.0**-20), torch.tensor([1.0, -4e6, 0.0]), 2.0**-20)
    integers, own = quantize_bias(torch.tensor([1.0, -4e6, 0.0]), 2.0**-20, raised)
    assert raised.shape == own.shape == ()
    assert -(2**31) < int(integers.min()) < -(2**31) + 2048
