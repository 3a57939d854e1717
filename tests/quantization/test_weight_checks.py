"""Checks of weights for NaN."""

import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.quantization.weight_checks import nan_warning


class WithNaN(nn.Module):
    """A layer, a NaN in code, and a special function whose form contains one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.where(y > 100, torch.nan, torch.digamma(y.abs() + 1))


def test_nan_in_code_is_no_weight(tmp_path, capsys):
    torch.manual_seed(0)
    module = clika_compile(
        WithNaN().eval(),
        tracing_inputs=[torch.randn(4, 8), torch.randn(5, 8)],
        calibration_inputs=[torch.randn(4, 8) for _ in range(3)],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    module.clika_export(tmp_path / "model.onnx")
    assert "NaN in the weights" not in capsys.readouterr().err


def test_nan_in_parameter_of_rank_0_warns():
    nan = torch.tensor(torch.nan)
    assert nan_warning({"clika.literal_1": nan}) is None
    assert nan_warning({"scale": nan}) == "NaN in the weights scale: all results that depend on them are NaN."
