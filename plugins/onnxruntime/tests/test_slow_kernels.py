"""Nodes with slow kernels are written as equal nodes with faster ones."""

import onnx
import pytest
import torch
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, clika_compile

SAMPLE = torch.linspace(-3, 3, 24).reshape(1, 4, 2, 3)


def export_prelu(slopes, path):
    """Export a PReLU with these slopes; return the operators of the file, and the module."""
    model = nn.PReLU(len(slopes))
    model.weight.data = torch.tensor(slopes)
    module = clika_compile(
        model.eval(), tracing_inputs=[SAMPLE], deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
    )
    file = module.clika_export(path).path  # compares the file with the module
    return {node.op_type for node in onnx.load(file).graph.node}


@pytest.mark.parametrize("slopes", [[0.25], [0.1, 1.0, -0.5, 1e-30]], ids=["one", "per channel"])
def test_clika_export_writes_prelu_as_maximum(tmp_path, slopes):
    """Slopes of at most 1 need no PRelu."""
    kinds = export_prelu(slopes, tmp_path / "model.onnx")
    assert {"Mul", "Max"} <= kinds
    assert "PRelu" not in kinds


@pytest.mark.parametrize("slopes", [[1.5], [0.1, 0.0, 0.2, 0.3], [float("nan")]], ids=["large", "zero", "nan"])
def test_clika_export_keeps_prelu_with_other_slopes(tmp_path, slopes):
    """A maximum would compute something else for slopes above 1, or for infinite elements and a slope of 0."""
    assert "PRelu" in export_prelu(slopes, tmp_path / "model.onnx")


def test_clika_export_prelu_keeps_infinities_and_nan(tmp_path):
    """Infinite elements and NaN give the same results as in PyTorch."""
    model = nn.PReLU().eval()
    deployment = DeploymentSettings_ONNXRuntime_ONNX()
    module = clika_compile(model, tracing_inputs=[SAMPLE], deployment_settings=deployment)
    artifact = module.clika_export(tmp_path / "model.onnx")
    special = SAMPLE.clone().flatten()
    special[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    special = special.reshape(SAMPLE.shape)
    target = module.clika_state.registry.targets["onnxruntime"]
    torch.testing.assert_close(target.load(artifact)([special])[0], model(special), rtol=0, atol=0, equal_nan=True)
