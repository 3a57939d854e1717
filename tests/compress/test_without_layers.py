"""A network with no layer to quantize: a warning before the data is read, and a module in float."""

import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


class RecordedData:
    """Batches that note in a list when they are read."""

    def __init__(self, capsys):
        self.capsys, self.shown_before = capsys, ""

    def __iter__(self):
        self.shown_before += self.capsys.readouterr().err
        yield from [torch.randn(2, 3, 8, 8)] * 2


@pytest.mark.parametrize("only_weights", [False, True])
def test_clika_compile_without_layers_warns_before_data_is_read(only_weights, capsys):
    """The warning names the layers that the target quantizes."""
    data = RecordedData(capsys)
    module = clika_compile(
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)).eval(),
        tracing_inputs=[torch.randn(2, 3, 8, 8)],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(prefer_weights_only_quantization=only_weights),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    shown = " ".join(data.shown_before.split())
    layers = "linear, lstm, matmul" if only_weights else "conv1d, conv2d, conv3d, linear, lstm, matmul"
    assert f"has no layer that onnxruntime quantizes, and stays in float. It quantizes {layers}." in shown
    assert not module.clika_summary().layers


def test_clika_compile_without_layers_for_latency_times_none(capsys):
    """Nothing is timed where there is nothing to quantize."""
    module = clika_compile(
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)).eval(),
        calibration_inputs=[torch.randn(2, 3, 8, 8), torch.randn(3, 3, 8, 8)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        optimize_for="latency",
    )
    assert not module.clika_summary().layers
    assert "Timing" not in capsys.readouterr().err
