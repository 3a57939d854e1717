"""Concatenations of values with different ranges: a coarse common scale costs no accuracy."""

import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)


class Join(nn.Module):
    """A function that does not depend on ``ratio``, by which the ranges of the joined values differ."""

    def __init__(self, ratio):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
        self.three = nn.Conv2d(32, 8, 3, padding=1)
        with torch.no_grad():
            self.two.weight.mul_(ratio)
            self.two.bias.mul_(ratio)
            self.three.weight[:, 16:].div_(ratio)

    def forward(self, x):
        return self.three(torch.cat([torch.relu(self.one(x)), torch.relu(self.two(x))], 1))


@pytest.mark.parametrize("ratio", [60, 2000])
@pytest.mark.parametrize(
    "deployment",
    [
        DeploymentSettings_ONNXRuntime_ONNX(),
        DeploymentSettings_OpenVINO_ONNX(),
        DeploymentSettings_TensorRT_ONNX(),
    ],
    ids=lambda deployment: deployment.target,
)
def test_clika_compile_concat_of_different_ranges_keeps_accuracy(ratio, deployment, tmp_path):
    """The joined layers run in INT8, the layer after the concatenation in float, and the file is accurate."""
    torch.manual_seed(0)
    model = Join(ratio).eval()
    data, x = [torch.randn(4, 3, 32, 32) for _ in range(8)], torch.randn(16, 3, 32, 32)
    module = clika_compile(
        model,
        calibration_inputs=data,
        tracing_inputs=[data[0][:1], data[0][:2]],
        quantization_settings=QuantizationSettings(),
        deployment_settings=deployment,
    )
    decisions = {layer.scope: not layer.reason for layer in module.clika_summary().layers}
    assert decisions == {"one": True, "two": True, "three": False}
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module
    expected, found = model(x).detach(), module(x).detach()
    noise = (expected - found).square().sum((1, 2, 3))
    signal = (expected - expected.mean(0)).square().sum((1, 2, 3))
    assert float((10 * torch.log10(signal / noise)).median()) >= 35
