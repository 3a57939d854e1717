"""Layers in float between INT8 layers: ONNX Runtime must not quantize their weights."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

BETWEEN = {
    "conv": [nn.Conv2d(8, 8, 3, padding=1)],
    "conv with relu": [nn.Conv2d(8, 8, 3), nn.ReLU()],
    "conv with relu6": [nn.Conv2d(8, 8, 3), nn.ReLU6()],
    "conv with pooling": [nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)],
    "transposed conv": [nn.ConvTranspose2d(8, 8, 4, 2, 1)],
    "transposed conv with groups": [nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=4), nn.ReLU()],
    "depthwise conv": [nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()],
}


def compile_with_float(layers, x):
    """Return a module of three layers, with the one in the middle in float."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Sequential(*layers), nn.Conv2d(8, 4, 1)).eval()
    weighted = [index for index, layer in enumerate(layers) if hasattr(layer, "weight")]
    return clika_compile(
        model,
        calibration_inputs=[x],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        layer_quantization_settings={
            f"2.{index}": LayerQuantizationSettings(skip_quantization=True) for index in weighted
        },
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )


def run_file(path, x, level):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("name", BETWEEN)
def test_clika_export_float_layer_between_int8_layers_runs_in_float(name, tmp_path):
    """A float layer runs in float at every optimization level, and `clika_explain` says so."""
    x = torch.randn(4, 4, 16, 16)
    module = compile_with_float(BETWEEN[name], x)
    path = module.clika_export(tmp_path / "model.onnx").path
    expected = module(x).detach().numpy()
    step = np.diff(np.unique(expected)).min()
    for level in LEVELS:
        difference = np.abs(run_file(path, x, level) - expected)
        assert difference.max() < 1.5 * step
        assert (difference > 0.5 * step).mean() < 0.01
    runs = {node.operator: node.runs for node in module.clika_explain().nodes if node.scope.startswith("2.")}
    assert {kind: runs[kind] for kind in runs if "conv" in kind} == {kind: "float" for kind in runs if "conv" in kind}


def test_clika_export_float_linear_between_int8_layers_runs_in_float(tmp_path):
    """A float linear layer between INT8 layers runs in float."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    module = clika_compile(
        nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval(),
        calibration_inputs=[x],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        layer_quantization_settings={"1": LayerQuantizationSettings(skip_quantization=True)},
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    path = module.clika_export(tmp_path / "model.onnx").path
    expected = module(x).detach().numpy()
    for level in LEVELS:
        np.testing.assert_allclose(run_file(path, x, level), expected, atol=1e-4)
    assert {node.scope: node.runs for node in module.clika_explain().nodes if node.macs}["1"] == "float"
