"""Files of many nodes: the time of a check grows in proportion to them."""

import sys

import pytest
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.rules import find_violations
from onnx import TensorProto as Kind
from onnx import helper
from sketches import IMAGE, Sketch, make_node


def build_shared_pair(times):
    """Many nodes, and a layer, that read one pair."""
    sketch = Sketch()
    x, w = sketch.quantize(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32)
    for number in range(times):
        sketch.node("Mul", f"step{number}", x, x)
    return sketch.model(sketch.node("MatMul", "out", x, w))


def build_growing_concat(times):
    """Concatenations that grow by one operand in each step; a layer reads each of them."""
    sketch = Sketch()
    whole, w = sketch.quantize(sketch.input("x", 1, 4)), sketch.weight("w", 4, 4)
    for number in range(times):
        whole = sketch.node("Concat", f"h{number}", whole, sketch.quantize(sketch.input(f"x{number}", 1, 4)), axis=0)
        sketch.node("MatMul", f"product{number}", whole, w)
    return sketch.model("product0")


def build_repeated_transpose(times):
    """A weight that is transposed repeatedly, and multiplied each time."""
    sketch = Sketch()
    x, w = sketch.quantize(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32, channels=32, axis=0)
    for number in range(times):
        w = sketch.node("Transpose", f"turned{number}", w, perm=[1, 0])
        sketch.node("MatMul", f"product{number}", x, w)
    return sketch.model("product0")


def build_repeated_scaling(times):
    """A convolution that is scaled repeatedly, and added to the sum each time."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE))
    total = x = sketch.node("Conv", "conv", x, sketch.weight("w", 16, 16, 1, 1))
    for number in range(times):
        x = sketch.node("Mul", f"scaled{number}", x, sketch.constant(f"c{number}", [1], 0.5))
        total = sketch.node("Add", f"total{number}", total, x)
    return sketch.model(total)


def build_permuted_sums(times):
    """INT8 convolutions; floats after an increasing number of moves are added to them."""
    sketch = Sketch()
    x, w = sketch.quantize(sketch.input("x", *IMAGE)), sketch.weight("w", 16, 16, 1, 1)
    y = sketch.node("Sigmoid", "y", sketch.input("z", *IMAGE))
    for number in range(times):
        y = sketch.node("Identity", f"moved{number}", y)
        sketch.node("Add", f"total{number}", sketch.node("Conv", f"conv{number}", x, w), y)
    return sketch.model("total0")


def build_repeated_reshape(times):
    """Sizes that are computed from an input in many steps, each read by a Reshape."""
    sketch = Sketch()
    x, sizes = sketch.input("x", 4, 32), sketch.input("sizes", "k", kind=Kind.INT64)
    for number in range(times):
        sizes = sketch.node("Abs", f"sizes{number}", sizes)
        sketch.node("Reshape", f"out{number}", x, sizes)
    return sketch.model("out0")


def build_many_branches(times):
    """Many branches, each with a pair, after values that are quantized outside."""
    sketch = Sketch()
    x, w = sketch.input("x", 32, 32), sketch.weight("w", 32, 32)
    for number in range(times):
        x = sketch.node("Relu", f"relu{number}", sketch.node("MatMul", f"product{number}", sketch.quantize(x), w))
    flag = sketch.input("flag", kind=Kind.BOOL)
    for number in range(times):
        graphs = {}
        for branch in ("then_branch", "else_branch"):
            name = f"{branch}{number}"
            nodes = [
                make_node("QuantizeLinear", f"{x} x_scale x_zero", f"{name}_Q"),
                make_node("DequantizeLinear", f"{name}_Q x_scale x_zero", f"{name}_DQ"),
                make_node("MatMul", f"{name}_DQ w_DQ", name),
            ]
            ends = [helper.make_tensor_value_info(name, Kind.FLOAT, None)]
            graphs[branch] = helper.make_graph(nodes, branch, [], ends)
        sketch.node("If", f"out{number}", flag, **graphs)
    return sketch.model("out0")


def count_calls(model):
    """Return the number of function calls and generator steps during a check."""
    count = 0

    def count_event(_frame, event, _what):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_event)
    try:
        find_violations(model)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow_cases("build_many_branches")
@pytest.mark.parametrize(
    "grown",
    [
        build_shared_pair,
        build_growing_concat,
        build_repeated_transpose,
        build_repeated_scaling,
        build_permuted_sums,
        build_repeated_reshape,
        build_many_branches,
    ],
)
def test_find_violations_steps_grow_linearly(grown):
    """Twice the nodes take twice the steps."""
    few, many = (count_calls(grown(times)) for times in (100, 200))
    assert many < 2.1 * few


def test_onnx_file_branch_shares_outer_scope():
    """A branch sees the outer scope without a copy of it."""
    file = OnnxFile(build_many_branches(3))
    for _, _, branch in file.branches:
        for around, own in ((file.producers, branch.producers), (file.initializers, branch.initializers)):
            assert {*around} <= {*own}
            assert len(own.maps[0]) <= 3
        assert branch.producers["product0"] is file.producers["product0"]
        assert "w" in branch.constants
        assert branch.types["w"] == Kind.FLOAT
        assert branch.shape("relu1") == [32, 32]
