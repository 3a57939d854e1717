"""Calibration inputs of any form are read once, and those that differ in a dim are traced with."""

import numpy as np
import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, ModelError, QuantizationSettings, clika_compile
from clika_ref.capture.calibration_inputs import STREAM_EXAMPLE_COUNT, CalibrationInputs, select_distinct_shapes
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import convert_arrays

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
    assert caught.value.__notes__ == ["in data_transform_fn, called for calibration batch 1"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}], ids=["array", "tuple", "dict"])
@pytest.mark.parametrize("has_tracing_inputs", [False, True])
def test_clika_compile_numpy_arrays_accepted(wrap, has_tracing_inputs):
    """NumPy arrays are accepted as elements and in tuples and dicts, with the same result as tensors."""
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((4, 8), np.float32) for _ in range(4)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).eval()

    def quantize(elements):
        tracing = [elements[0], wrap(np.zeros((2, 8), np.float32))] if has_tracing_inputs else None
        return clika_compile(
            model,
            tracing_inputs=tracing,
            calibration_inputs=elements,
            quantization_settings=QuantizationSettings(),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            discard_input_model=False,
        )

    arrays, tensors = quantize([wrap(x) for x in data]), quantize([wrap(torch.from_numpy(x)) for x in data])
    x = torch.from_numpy(data[0])
    assert torch.equal(arrays(x), tensors(x))


def test_clika_export_numpy_example_accepted(tmp_path):
    """An example to compare on may be a NumPy array; a call with one is rejected without its elements."""
    module = clika_compile(nn.Linear(4, 2), tracing_inputs=[torch.ones(2, 4), torch.ones(3, 4)])
    array = np.zeros((5, 4), np.float32)
    module.clika_export(tmp_path / "model.onnx", example_inputs=array)
    with pytest.raises(ModelError, match=r"is a ndarray of float32, but the model expects a tensor. Pass torch.from_n"):
        module(array)


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3)[:, ::-1], np.arange(6.0, dtype=">f8").reshape(2, 3)])
def test_convert_arrays_copies_other_layouts(array):
    """Reversed arrays, as images from BGR to RGB, and arrays of the other byte order are copied."""
    assert convert_arrays(array, "tracing input 1").tolist() == array.tolist()


def test_convert_arrays_shares_memory_or_copies_read_only():
    """Tensors share the memory of writable arrays; read-only ones are copied."""
    array = np.zeros(3, np.float32)
    shared, copied = convert_arrays([array, np.broadcast_to(array, (2, 3))], "tracing input 1")
    array[0] = 1
    assert shared[0] == 1
    assert copied.sum() == 0


def test_convert_arrays_without_numbers_rejected():
    """An array without numbers raises an error with the element and the remedy."""
    with pytest.raises(ModelError, match=r"calibration batch 3 has a NumPy array of dtype <U1.*data_transform_fn"):
        convert_arrays({"input": np.array(["a"])}, "calibration batch 3")


@pytest.mark.parametrize("other", [torch.float64, torch.uint8])
def test_clika_compile_other_dtype_error_names_batch_and_conversion(other):
    """Batches of another dtype than the weights raise an error with the conversion, the first one as a later one."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    data = [torch.ones(4, 8) for _ in range(4)]
    settings = {
        "quantization_settings": QuantizationSettings(),
        "deployment_settings": DeploymentSettings_ONNXRuntime_ONNX(),
    }
    with pytest.raises(ModelError, match=f"in calibration batch 1 and {other}.* in calibration batch 4. Use one dtype"):
        clika_compile(model, calibration_inputs=[*data[:3], data[3].to(other)], **settings)
    expected = (
        f"(?s)fails in eager mode on calibration batch 1: .*Its weights are torch.float32, but inputs are {other}: "
        r"convert these, for example with data_transform_fn=lambda batch: batch.to\(torch.float32\)"
    )
    with pytest.raises(ModelError, match=expected):
        clika_compile(model, calibration_inputs=[x.to(other) for x in data], **settings)


def test_clika_compile_labels_in_tuples_error_names_conversion():
    """Batches of inputs and labels raise an error with the function that selects the inputs."""
    data = [(torch.zeros(4, 8), torch.zeros(4))] * 2
    with pytest.raises(ModelError, match=r"\(inputs, labels\), pass data_transform_fn=lambda batch: batch\[0\]"):
        clika_compile(nn.Linear(8, 4), tracing_inputs=data)
