"""Outputs that hide the error of layers: masked ones, integers, and table look-ups."""

import pytest
import torch
from seeded_tensors import randn
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.core.errors import ModelError
from clika_ref.quantization.algorithms.sqnr import sum_squared_error, sum_squares

ORT = DeploymentSettings_ONNXRuntime_ONNX()
MIN_FLOAT32 = torch.finfo(torch.float32).min


class Scores(nn.Module):
    """Two layers, followed by a function such as a mask."""

    def __init__(self, end):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.end = nn.Linear(16, 32), nn.Linear(32, 8), end

    def forward(self, x):
        return self.end(self.second(self.first(x).relu()))


def make_mask(fill):
    keep = torch.arange(8) % 2 == 0
    return lambda y: y.masked_fill(~keep, fill)


def compile_model(model, data, **settings):
    return clika_compile(
        model.eval(),
        tracing_inputs=data[:1],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(**settings),
        deployment_settings=ORT,
    ).eval()


def read_decision(model, **settings):
    data = [randn(8, 16, seed=n) for n in range(4)]
    return compile_model(model, data).clika_initialize_algorithms(
        QuantizationSettings(**settings), deployment_settings=ORT
    )


@pytest.mark.parametrize("fill", [-torch.inf, MIN_FLOAT32])
def test_sensitivity_ignores_masked_outputs(fill):
    """Masked outputs do not change sensitivities and predictions."""
    plain = read_decision(Scores(make_mask(0.0)))
    found = read_decision(Scores(make_mask(fill)))
    for with_mask, without in zip(found.layers, plain.layers, strict=True):
        assert with_mask.sensitivity == pytest.approx(without.sensitivity, rel=0.5)
    assert all(row.sqnr < 100 for row in found.what_if)


@pytest.mark.parametrize("end", [lambda y: y.argmax(-1), lambda y: y > 0], ids=["argmax", "above"])
def test_sensitivity_without_gradient_keeps_float_with_reason(end):
    """Layers without a gradient to the outputs stay in float, with the reason."""
    found = read_decision(Scores(end))
    assert {layer.reason.partition(":")[0] for layer in found.layers} == {"its sensitivity cannot be estimated"}
    assert not any(layer.reason for layer in read_decision(Scores(end), automatic_skip_quantization=False).layers)


def test_embedding_output_has_range_and_runs_in_int8():
    """The output of an embedding has a range, and its reader runs in INT8."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8))
    data = [torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    module = compile_model(model, data, automatic_skip_quantization=False)
    (layer,) = (node for node in module.clika_explain().nodes if node.macs)
    assert (layer.planned, layer.runs) == ("int8", "int8")


def test_clika_explain_int8_between_reshapes_of_runtime():
    """INT8 layers between reshapes of the runtime are explained."""
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    data = [randn(2, 5, 16, seed=n) for n in range(4)]
    found = compile_model(model, data, automatic_skip_quantization=False).clika_explain()
    assert [node.runs for node in found.nodes if node.macs] == ["int8", "int8"]


@pytest.mark.parametrize(
    "last", ["hello", None, {"nonsense": 1}, torch.randn(4, 15), torch.randn(4, 16, dtype=torch.float64)]
)
def test_calibration_last_batch_of_other_type_raises(last):
    """A last batch of another type raises an error."""
    data = [torch.randn(8, 16), torch.randn(8, 16)]
    with pytest.raises(ModelError, match="calibration batch 3"):
        compile_model(Scores(torch.relu), [*data, last])


def test_calibration_smaller_last_batch_dropped():
    """A smaller last batch is left out if the batch dim is fixed."""
    data = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(3, 16)]
    assert compile_model(Scores(torch.relu), data)(data[0]).shape == (8, 8)


def test_calibration_empty_batch_raises():
    """A batch without samples raises an error."""
    data = [torch.randn(8, 16), torch.randn(4, 16), torch.randn(0, 16)]
    with pytest.raises(ModelError, match=r"calibration batch 3 has no samples. Remove it."):
        clika_compile(
            Scores(torch.relu).eval(),
            tracing_inputs=data[:2],
            calibration_inputs=data,
            quantization_settings=QuantizationSettings(),
            deployment_settings=ORT,
        )


def test_sum_squares_and_squared_error_skip_masked():
    """Squared norms leave out masked elements; an element that only one tensor masks counts as inf."""
    x = torch.tensor([3.0, -torch.inf, MIN_FLOAT32, torch.nan])
    assert sum_squares(x) == 9.0
    assert sum_squared_error(torch.tensor([2.0, -torch.inf, -torch.inf, torch.nan]), x) == 1.0
    assert sum_squared_error(torch.tensor([3.0, 0.0, MIN_FLOAT32, torch.nan]), x) == torch.inf
