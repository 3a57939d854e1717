"""Artifacts in integers held against their own graphs: outputs before which nothing is rounded differ as floats do."""

import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


class Read(nn.Module):
    """What is read is returned as it is, and read by a layer that becomes integers."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        read, (last, _) = self.read(x)
        return self.head(read), last


def test_an_output_in_float_beside_integers_may_differ_by_roundings(tmp_path):
    torch.manual_seed(0)
    module = clika_compile(
        Read().eval(),
        calibration_inputs=[torch.randn(2, 5, 16) for _ in range(2)],
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=1e9),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    assert module._clika_quantized.plan.weights.keys() == {"linear"}
    module.clika_export(tmp_path / "read.onnx")
    assert (tmp_path / "read.onnx").exists()
