"""INT8 layers with tiny weights and a large bias: the accumulator stays within INT32 in the runtime."""

import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


def build_network(gamma):
    """Return two convolutions; the batch norm between them has almost removed one channel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[1].weight[0] = gamma
        model[1].bias.fill_(2.0)
    return model


@pytest.mark.parametrize("gamma", [1e-3, 1e-5, 1e-8])
def test_clika_export_large_bias_of_small_row_does_not_wrap(tmp_path, gamma):
    """A row of tiny weights with a large bias keeps the accuracy of the simulation in the file."""
    data = [torch.randn(8, 3, 8, 8) for _ in range(6)]
    module = clika_compile(
        build_network(gamma),
        tracing_inputs=[data[0][:1], data[0][:2]],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the simulation
    assert len(module.clika_explain().not_quantized) == 0
    assert all(not layer.reason for layer in module.clika_quantization.layers)
