"""Calibration inputs are read once, whatever they are, and those that show which sides differ are traced with."""

import pytest
import torch

from clika_ref import ModelError
from clika_ref.capture.calibration_inputs import STREAM_EXAMPLE_COUNT, CalibrationInputs, select_distinct_shapes
from clika_ref.capture.callables import make_callable

CALLEE = make_callable(torch.nn.Linear(3, 2))


class Counting:
    """An iterable that counts how often it is read, and how far."""

    def __init__(self, elements):
        self.elements, self.begun, self.read = elements, 0, 0

    def __iter__(self):
        self.begun += 1
        for element in self.elements:
            self.read += 1
            yield element


def batch(*shape):
    return torch.ones(shape)


def sides(calls):
    return [tuple(call.args[0].shape) for call in calls]


def test_an_iterable_is_read_once_and_no_further_than_tracing_needs():
    source = Counting([batch(n, 3) for n in range(1, 10)])
    found = CalibrationInputs(source)
    assert sides(found.examples(CALLEE)) == [(n, 3) for n in range(1, STREAM_EXAMPLE_COUNT + 1)]
    assert (source.begun, source.read) == (1, STREAM_EXAMPLE_COUNT)
    assert sides(found.calls(CALLEE)) == [(n, 3) for n in range(1, 10)]
    assert (source.begun, source.read) == (1, 9)


def test_of_a_list_those_are_traced_with_that_differ_in_a_side_wherever_they_stand():
    data = [batch(4, 3)] * 20 + [batch(2, 3)]
    found = CalibrationInputs(data)
    assert sides(found.examples(CALLEE)) == [(4, 3), (2, 3)]
    assert sides(found.calls(CALLEE)) == [(4, 3)] * 20 + [(2, 3)]


def test_each_element_is_transformed_once():
    seen = []
    found = CalibrationInputs([batch(4, 3), batch(4, 3), batch(2, 3)], lambda x: seen.append(len(x)) or x)
    assert len(found.examples(CALLEE)) == 2
    assert len([*found.calls(CALLEE)]) == 3
    assert sorted(seen) == [2, 4, 4]


def test_all_calls_come_without_tracing_too_and_none_is_read_before_it_is_asked_for():
    source = Counting([batch(n, 3) for n in (1, 2)])
    calls = CalibrationInputs(source).calls(CALLEE)
    assert source.read == 0
    assert sides([next(calls)]) == [(1, 3)]
    assert source.read == 1
    assert sides(calls) == [(2, 3)]


@pytest.mark.parametrize(
    ("elements", "chosen"),
    [
        ([batch(4, 3), batch(4, 3)], [0]),
        ([batch(4, 3), batch(4, 5), batch(2, 3), batch(7, 8)], [0, 1, 2]),
        ([(batch(4), 1), (batch(4), 2), (batch(4), 3)], [0, 1]),
        ([batch(4), batch(4, 1), batch(4, 2)], [0, 1]),
        ([{"x": batch(4), "n": None}, {"x": batch(4).int(), "n": None}], [0, 1]),
        ([], []),
    ],
)
def test_an_element_is_told_apart_by_each_side_that_no_other_showed_to_differ(elements, chosen):
    assert select_distinct_shapes(elements) == chosen


@pytest.mark.parametrize("nothing", [[], (), iter([]), Counting([])])
def test_nothing_to_calibrate_with_is_an_error(nothing):
    with pytest.raises(
        ModelError, match=r"calibration_inputs has no elements. Give at least one batch, and no generator"
    ):
        CalibrationInputs(nothing).examples(CALLEE)


def test_one_input_instead_of_a_list_is_an_error():
    with pytest.raises(ModelError, match=r"calibration_inputs are a Tensor. Give a list"):
        CalibrationInputs(batch(4, 3))


def test_an_error_names_the_element():
    def fail(x):
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file") as caught:
        CalibrationInputs([batch(4, 3)], fail).examples(CALLEE)
    assert caught.value.__notes__ == ["in data_transform_fn, called for element 1 of the inputs"]
