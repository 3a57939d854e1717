"""Explained INT8 nodes of ONNX Runtime, and the reasons for float, read from files with one missing part each."""

from dataclasses import replace

import pytest
import torch
from clika_ref_onnxruntime import explaining
from clika_ref_onnxruntime.explaining import ALL_OPTIMIZATIONS, NO_OPTIMIZATIONS
from clika_ref_onnxruntime.target import OnnxRuntime

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


class Sketch:
    """A graph in the making: ``pair`` puts a value through integers."""

    def __init__(self, *shape):
        self.graph = Graph("sketch")
        self.build = Builder(self.graph, OPERATORS)
        self.x = self.graph.add_input(TensorType(torch.float32, shape), "x")

    def pair(self, value):
        steps = self.build("quantize", value, 0.05, 128, dtype=torch.uint8)
        return self.build("dequantize", steps, 0.05, 128)

    def weight(self, *shape):
        steps = self.build.constant(torch.ones(shape, dtype=torch.int8), "steps")
        return self.build("dequantize", steps, self.build.constant(torch.full((shape[0],), 0.02), "scale"), axis=0)

    def bias(self, length):
        steps = self.build.constant(torch.ones(length, dtype=torch.int32), "bias_steps")
        return self.build("dequantize", steps, self.build.constant(torch.full((length,), 0.001), "bias_scale"), axis=0)

    def explain(self, result, folder, level=ALL_OPTIMIZATIONS):
        self.graph.add_output(result)
        target = OnnxRuntime(optimization_level=level)
        found = target.explain(target.compile(self.graph, folder / "model.onnx"))
        return {name: found[name] for name in found if "quantize" not in name}


def add_convolution(sketch, x, bias=None):
    attrs = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return sketch.build("conv2d", x, sketch.weight(4, 3, 3, 3), bias, **attrs)


def build_quantized_convolution(sketch, zero_point):
    activation = sketch.build("relu", add_convolution(sketch, sketch.pair(sketch.x)))
    steps = sketch.build("quantize", activation, 0.05, zero_point, dtype=torch.uint8)
    return sketch.build("dequantize", steps, 0.05, zero_point)


def test_explain_quantized_conv_fuses_relu(tmp_path):
    """A quantized convolution runs in INT8 and fuses its relu."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(build_quantized_convolution(sketch, 0), tmp_path)
    assert found == {"conv2d": "int8", "relu": "fused"}


def test_explain_range_below_relu_minimum_keeps_conv_float(tmp_path):
    """A quantized range that includes negative results keeps the layer in float."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(build_quantized_convolution(sketch, 10), tmp_path)
    assert found["conv2d"] == "float: the activation after it clips within the quantized range of the output"


def test_explain_conv_with_float_result_runs_in_float(tmp_path):
    """A convolution with a float result runs in float."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(add_convolution(sketch, sketch.pair(sketch.x)), tmp_path)
    assert found["conv2d"].startswith("float: ONNX Runtime runs Conv in INT8 only if its output is quantized")


def test_explain_conv_of_float_operand_names_operand(tmp_path):
    """A convolution with a float operand names that operand."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(sketch.pair(add_convolution(sketch, sketch.x)), tmp_path)
    assert found == {"conv2d": "float: its operand x is not quantized"}


@pytest.mark.parametrize(("is_whole", "precision"), [(True, "int8"), (False, "float: its bias is float, and")])
def test_explain_linear_with_float_result_needs_int_bias(tmp_path, is_whole, precision):
    """A linear layer with a float result needs a quantized bias."""
    sketch = Sketch(2, 3)
    bias = sketch.bias(4) if is_whole else sketch.build.constant(torch.ones(4), "bias")
    found = sketch.explain(sketch.build("linear", sketch.pair(sketch.x), sketch.weight(4, 3), bias), tmp_path)
    assert found["linear"].startswith(precision)


def test_explain_hardswish_without_int8_kernel_named(tmp_path):
    """An operator without an INT8 kernel is named, although the runtime rewrites it."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(sketch.pair(sketch.build("hardswish", sketch.pair(sketch.x))), tmp_path)
    assert found == {"hardswish": "float: ONNX Runtime has no INT8 kernel for HardSwish"}


def test_explain_float_operand_has_no_reason(tmp_path):
    """A node with float operands is float without a reason."""
    sketch = Sketch(1, 3, 8, 8)
    assert sketch.explain(sketch.build("tanh", sketch.x), tmp_path) == {"tanh": "float"}


def test_explain_reshape_of_int8_runs_in_int8(tmp_path):
    """A reshape of INT8 tensors runs in INT8."""
    sketch = Sketch(1, 3, 8, 8)
    moved = sketch.build("reshape", sketch.pair(sketch.x), shape=(3, 64))
    steps = sketch.build("quantize", moved, 0.05, 128, dtype=torch.uint8)
    assert sketch.explain(sketch.build("dequantize", steps, 0.05, 128), tmp_path) == {"reshape": "int8"}


def test_explain_without_optimizations_runs_in_float(tmp_path):
    """Without optimizations nothing runs in INT8."""
    sketch = Sketch(1, 3, 8, 8)
    found = sketch.explain(sketch.pair(add_convolution(sketch, sketch.pair(sketch.x))), tmp_path, NO_OPTIMIZATIONS)
    assert found == {"conv2d": "float: ONNX Runtime's optimizations are off"}


def test_explain_optimized_graph_loaded_once_per_level(tmp_path, monkeypatch):
    """The graph before layout changes is loaded once."""
    levels = []
    whole = explaining.load_optimized_graph
    monkeypatch.setattr(
        explaining, "load_optimized_graph", lambda path, level: levels.append(level) or whole(path, level)
    )
    graph, target = Graph("relu"), OnnxRuntime()
    build = Builder(graph, OPERATORS)
    graph.add_output(build("relu", graph.add_input(TensorType(torch.float32, (2, 4)), "x")))
    artifact = target.compile(graph, tmp_path / "model.onnx")
    assert target.explain(artifact) == {"relu": "float"}
    assert target.profile(artifact, [torch.zeros(2, 4)])["relu"] > 0
    assert levels == ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]
    moved = replace(artifact, path=(tmp_path / "model.onnx").rename(tmp_path / "moved.onnx"))
    assert target.explain(moved) == {"relu": "float"}
