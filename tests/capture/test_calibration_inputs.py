"""Calibration inputs of any form are read once, and those that differ in a dim are traced with."""

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


def make_batch(*shape):
    return torch.ones(shape)


def read_shapes(calls):
    return [tuple(call.args[0].shape) for call in calls]


def test_calibration_inputs_iterable_read_once():
    """An iterable is read once, and only as far as tracing needs."""
    source = Counting([make_batch(n, 3) for n in range(1, 10)])
    found = CalibrationInputs(source)
    assert read_shapes(found.examples(CALLEE)) == [(n, 3) for n in range(1, STREAM_EXAMPLE_COUNT + 1)]
    assert (source.begun, source.read) == (1, STREAM_EXAMPLE_COUNT)
    assert read_shapes(found.calls(CALLEE)) == [(n, 3) for n in range(1, 10)]
    assert (source.begun, source.read) == (1, 9)


def test_calibration_inputs_examples_differ_in_shape():
    """The examples of a list are its elements that differ in shape."""
    data = [make_batch(4, 3)] * 20 + [make_batch(2, 3)]
    found = CalibrationInputs(data)
    assert read_shapes(found.examples(CALLEE)) == [(4, 3), (2, 3)]
    assert read_shapes(found.calls(CALLEE)) == [(4, 3)] * 20 + [(2, 3)]


def test_calibration_inputs_elements_transformed_once():
    """Each element is transformed once."""
    seen = []
    found = CalibrationInputs(
        [make_batch(4, 3), make_batch(4, 3), make_batch(2, 3)], lambda x: seen.append(len(x)) or x
    )
    assert len(found.examples(CALLEE)) == 2
    assert len([*found.calls(CALLEE)]) == 3
    assert sorted(seen) == [2, 4, 4]


def test_calibration_inputs_calls_read_lazily():
    """Elements are read lazily, also without tracing."""
    source = Counting([make_batch(n, 3) for n in (1, 2)])
    calls = CalibrationInputs(source).calls(CALLEE)
    assert source.read == 0
    assert read_shapes([next(calls)]) == [(1, 3)]
    assert source.read == 1
    assert read_shapes(calls) == [(2, 3)]


@pytest.mark.parametrize(
    ("elements", "chosen"),
    [
        ([make_batch(4, 3), make_batch(4, 3)], [0]),
        ([make_batch(4, 3), make_batch(4, 5), make_batch(2, 3), make_batch(7, 8)], [0, 1, 2]),
        ([(make_batch(4), 1), (make_batch(4), 2), (make_batch(4), 3)], [0, 1]),
        ([make_batch(4), make_batch(4, 1), make_batch(4, 2)], [0, 1]),
        ([{"x": make_batch(4), "n": None}, {"x": make_batch(4).int(), "n": None}], [0, 1]),
        ([], []),
    ],
)
def test_select_distinct_shapes_by_new_dim(elements, chosen):
    """Elements with a dim that has not varied before are selected."""
    assert select_distinct_shapes(elements) == chosen


@pytest.mark.parametrize("nothing", [[], (), iter([]), Counting([])])
def test_calibration_inputs_empty_raises(nothing):
    """Empty calibration inputs raise an error."""
    with pytest.raises(
        ModelError, match=r"calibration_inputs has no elements. Give at least one batch, and no generator"
    ):
        CalibrationInputs(nothing).examples(CALLEE)


def test_calibration_inputs_single_tensor_raises():
    """A tensor in place of a list raises an error."""
    with pytest.raises(ModelError, match=r"calibration_inputs are a Tensor. Give a list"):
        CalibrationInputs(make_batch(4, 3))


def test_calibration_inputs_error_names_element():
    """An error of a user function names the element."""

    def fail(x):
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file") as caught:
        CalibrationInputs([make_batch(4, 3)], fail).examples(CALLEE)
    assert caught.value.__notes__ == ["in data_transform_fn, called for element 1 of the inputs"]
