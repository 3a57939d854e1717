"""Low-bit weights with rows that do not fill whole bytes: OpenVINO computes wrong results for 4-bit ones."""

import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_OpenVINO_ONNX, QuantizationSettings, clika_compile


def quantize(bits, inputs=33):
    torch.manual_seed(0)
    data = [torch.randn(16, inputs) for _ in range(6)]
    return clika_compile(
        nn.Sequential(nn.Linear(inputs, 24), nn.SiLU(), nn.Linear(24, 8)).eval(),
        tracing_inputs=[data[0][:1], data[0][:2]],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(
            prefer_weights_only_quantization=True, weights_num_bits=bits, quantization_sensitivity_threshold=1e9
        ),
        deployment_settings=DeploymentSettings_OpenVINO_ONNX(),
    )


def test_clika_compile_odd_rows_take_8_bits_with_reason(tmp_path):
    """With 8 bits allowed, a layer with rows of odd length takes 8, and the table has the reason."""
    module = quantize([8, 4])
    first, second = module.clika_quantization.layers
    assert (first.bits[0], second.bits[0]) == (8, 4)
    assert first.decision == "quantized: its rows of 33 elements do not fill whole bytes with 4 bits"
    assert second.decision == "quantized"
    module.clika_export(tmp_path / "model.onnx")


@pytest.mark.parametrize(("inputs", "decision"), [(33, "float: its rows of 33 elements"), (34, "quantized")])
def test_clika_compile_odd_rows_without_8_bits_stay_float(tmp_path, inputs, decision):
    """With 4 bits alone, such a layer stays float; rows of even length do not."""
    module = quantize([4], inputs)
    assert next(row for row in module.clika_quantization.layers if row.scope == "0").decision.startswith(decision)
    module.clika_export(tmp_path / "model.onnx")
