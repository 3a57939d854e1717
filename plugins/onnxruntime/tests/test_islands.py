"""Operators between INT8 layers run in INT8 or in float, as the measured times advise."""

import onnx
import pytest
import torch
from clika_ref_onnxruntime.scheme import find_measurement
from clika_ref_onnxruntime.target import OnnxRuntime, keep_islands_in_float
from torch import nn
from torch.nn import functional as F

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile


class Islands(nn.Module):
    """A pooling, a sum and an upsampling, each between convolutions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x):
        one, two, three, four = self.layers
        x = one(x)
        y = two(F.avg_pool2d(x, 2))
        y = three(F.interpolate(y, scale_factor=2.0))
        return four(x + y)


def compile_islands():
    torch.manual_seed(0)
    x = torch.randn(4, 4, 16, 16)
    return clika_compile(
        Islands().eval(),
        calibration_inputs=[x],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )


def test_clika_compile_slower_islands_run_in_float(tmp_path):
    """An average pooling, which is slower in INT8, runs in float, and a sum in INT8."""
    slower = find_measurement()[0].slower
    assert {"avg_pool2d", "upsample_nearest2d"} <= slower
    assert not slower & {"add", "cat", "mul"}
    module = compile_islands()
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module
    found = {node.operator: node for node in module.clika_explain().nodes}
    runs = {kind: node.runs for kind, node in found.items()}
    assert (runs["avg_pool2d"], runs["upsample_nearest2d"], runs["add"], runs["conv2d"]) == (
        "float",
        "float",
        "int8",
        "int8",
    )
    assert found["avg_pool2d"].is_between_int8
    assert found["upsample_nearest2d"].reason.startswith("the file keeps Resize in float, since INT8 is slower")


@pytest.mark.parametrize("in_float", [frozenset(), frozenset({"add"})])
def test_keep_islands_in_float_adds_barriers_for_float(in_float):
    """The scheme lists the operators in INT8, and the target those in float."""
    target = keep_islands_in_float(OnnxRuntime(), in_float)
    assert target.scheme is not None
    assert ("add" in target.scheme.elementwise) is not bool(in_float)
    assert target.float_islands == in_float


def test_clika_export_float_island_has_barrier(tmp_path):
    """Only a float island is separated from the quantization after it."""
    nodes = onnx.load(compile_islands().clika_export(tmp_path / "model.onnx").path).graph.node
    barriers = {node.name.partition("/")[0] for node in nodes if node.name.endswith("/float")}
    assert barriers == {"avg_pool2d", "upsample_nearest2d"}


def test_clika_compile_logs_note_on_scheme(capsys, monkeypatch):
    """If the runtime here was not measured, the log of the quantization states what was."""
    note = "operators between INT8 layers are placed as measured with version 1"
    monkeypatch.setattr(OnnxRuntime, "scheme_note", property(lambda _: note, lambda *_: None))
    compile_islands()
    assert f"onnxruntime: {note}" in " ".join(capsys.readouterr().err.split())


def test_clika_export_barriers_follow_operator_not_onnx_node(tmp_path):
    """An adaptive pooling is written as the ONNX node of an average pooling, and is faster in INT8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 4, 1)).eval()
    module = clika_compile(
        model,
        calibration_inputs=[torch.randn(4, 4, 10, 10)],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    module.clika_export(tmp_path / "model.onnx")
    assert {node.operator: node.runs for node in module.clika_explain().nodes}["adaptive_avg_pool2d"] == "int8"
