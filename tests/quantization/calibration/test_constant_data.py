"""Calibration data without variation: such activations have no range, and are not quantized."""

import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, ModelError, QuantizationSettings, clika_compile


class Cell(nn.Module):
    """A recurrent cell: its state is 0 at the first step of each sequence."""

    def __init__(self):
        super().__init__()
        self.gate, self.state, self.output = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x, hidden):
        hidden = torch.tanh(self.gate(x) + self.state(hidden))
        return self.output(hidden), hidden


def quantize(data):
    torch.manual_seed(0)
    return clika_compile(
        Cell().eval(),
        tracing_inputs=[tuple(t[:1] for t in data[0]), tuple(t[:2] for t in data[0])],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
    )


@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_clika_compile_constant_activation_stays_float(constant):
    """The layer that reads a constant activation stays float, with the reason; later steps keep their accuracy."""
    module = quantize([(torch.randn(8, 16), torch.full((8, 24), constant)) for _ in range(4)])
    reasons = {layer.scope: layer.reason for layer in module.clika_quantization.layers}
    assert reasons["state"] == f"its input was {constant:g} in all calibration data: its range is unknown"
    assert reasons["gate"] == reasons["output"] == ""
    torch.manual_seed(0)
    model, x = Cell().eval(), torch.randn(64, 16)
    hidden = model(torch.randn(64, 16), torch.zeros(64, 24))[1].detach()
    expected, found = (m(x, hidden)[0].detach() for m in (model, module))
    assert 10 * torch.log10(expected.square().sum() / (found - expected).square().sum()) > 25


def test_clika_compile_zero_data_rejected_by_name():
    """Calibration data of zeros raises an error with the names of the inputs."""
    with pytest.raises(ModelError, match=r"cannot quantize Cell: 'x', 'hidden' were 0 in all calibration data\. Give"):
        quantize([(torch.zeros(8, 16), torch.zeros(8, 24))] * 2)
