"""Times of ONNX Runtime's profiler are joined to the nodes of a graph, under names of its optimizations as well."""

import json

import onnx
import pytest
import torch
from clika_ref_onnxruntime import target as module_of_target
from clika_ref_onnxruntime.explaining import ALL_OPTIMIZATIONS, NO_OPTIMIZATIONS, OnnxGraph
from clika_ref_onnxruntime.profiling import seconds_of_nodes
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.core.errors import TargetError

X = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Convolutions that the optimizations rename: they compute in blocks of channels, or in INT8."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head((self.second(torch.relu(self.first(x))) + x).mean((2, 3)))


def compile_residual(settings):
    data = {} if settings is None else {"calibration_inputs": [X, X[:2]], "quantization_settings": settings}
    return clika_compile(
        Residual().eval(), tracing_inputs=[X, X[:2]], deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(), **data
    )


@pytest.mark.parametrize("settings", [None, QuantizationSettings(automatic_skip_quantization=False)])
@pytest.mark.parametrize("level", [ALL_OPTIMIZATIONS, NO_OPTIMIZATIONS])
def test_profile_each_layer_has_time(settings, level, tmp_path):
    """Each layer has its time, and the file is the only one written."""
    target = OnnxRuntime(optimization_level=level)
    artifact = compile_residual(settings).clika_export(tmp_path / "model.onnx")
    found = target.profile(artifact, [X])
    assert {"conv2d", "conv2d_1"} <= set(found)
    assert any(name in found for name in ("output", "linear", "matmul"))
    assert all(seconds > 0 for seconds in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def write_profile(events, folder):
    place = folder / "profile.json"
    place.write_text(json.dumps(events))
    return place


def make_event(name, micros, cat="Node"):
    return {"cat": cat, "name": name, "dur": micros}


def test_seconds_of_nodes_sums_medians_per_node(tmp_path):
    """Medians of calls are summed by the node of the graph."""
    node = onnx.helper.make_node
    value = onnx.helper.make_tensor_value_info
    ends = [value("x", 1, [2])], [value("y", 1, [2])]
    written = [
        node("Abs", ["x"], ["a"], "layer/Abs"),
        node("Neg", ["a"], ["n"], "layer/Neg"),
        node("Exp", ["n"], ["y"], "top/Exp"),
    ]
    made = [
        node("Abs", ["x"], ["a"], "layer/Abs"),
        node("Neg", ["a"], ["n"], "layer/Neg"),
        node("Exp", ["n"], ["y"], "y_nchwc_token_3"),
    ]
    made += [node("ReorderOutput", ["x"], ["a"], "reorder")]
    for name, nodes in (("written", written), ("made", made)):
        onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, name, *ends)), tmp_path / f"{name}.onnx")
    events = [make_event("layer/Abs_kernel_time", t) for t in (900, 10, 12)] + [make_event("layer/Neg_kernel_time", 5)]
    events += [
        make_event("y_nchwc_token_3_kernel_time", 7),
        make_event("reorder_kernel_time", 3),
        make_event("layer/Abs_fence_before", 50),
    ]
    events += [make_event("model_run", 1000, "Session"), {"cat": "Session", "name": "session_initialization"}]
    graph = OnnxGraph(tmp_path / "written.onnx")
    found = seconds_of_nodes(graph, graph, tmp_path / "made.onnx", write_profile(events, tmp_path))
    assert found == pytest.approx({"layer": 17e-6, "top": 7e-6, "": 3e-6})


def test_profile_missing_runtime_raises(monkeypatch, tmp_path):
    """Without the runtime, the error names the command to install it."""
    artifact = compile_residual(None).clika_export(tmp_path / "model.onnx")
    monkeypatch.setattr(module_of_target, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="onnxruntime is not installed; pip install onnxruntime"):
        OnnxRuntime().profile(artifact, [X])
