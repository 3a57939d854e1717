"""Unusual files: invalid ones, cyclic ones, and ones with external data."""

import numpy as np
import onnx
import pytest
from clika_ref_tensorrt import onnx_file
from clika_ref_tensorrt.explaining import predict_precisions
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.rules import find_violations
from clika_ref_tensorrt.target import TensorRt
from further_planted import build_in_local_function
from onnx import TensorProto as Kind
from onnx import helper, numpy_helper
from planting import (
    build_convolution_with_constant_nodes,
    find,
    insert_operator,
    make_input,
    set_constant,
    set_node_inputs,
)
from sketches import IMAGE, Sketch, build_branches, build_concatenation, build_convolution, make_node

from clika_ref.core.errors import TargetError
from clika_ref.onnx_export.writing import MAX_INLINE_BYTES


def find_messages(model):
    return [str(violation) for violation in find_violations(model)]


def truncate_field(model, name, field, kept=0):
    """Remove operands, results or attributes of a node."""
    del getattr(find(model, name), field)[kept:]
    return model


def build_fractional_axis():
    """An axis that is no integer."""
    model = truncate_field(build_convolution(), "w_Q", "attribute")
    find(model, "w_Q").attribute.append(helper.make_attribute("axis", 1.5))
    return model


def build_nameless_node():
    model = truncate_field(build_convolution(), "relu", "output")
    find(model, "relu").ClearField("name")
    return model


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (
            lambda: truncate_field(build_convolution(), "x_Q", "input", 1),
            "x_Q: has 1 operands, but QuantizeLinear has 2 to 3",
        ),
        (lambda: truncate_field(build_convolution(), "conv", "input", 1), "conv: has 1 operands, but Conv has 2 to 3"),
        (
            lambda: truncate_field(build_convolution(), "norm", "input", 3),
            "norm: has 3 operands, but BatchNormalization has 5",
        ),
        (lambda: set_node_inputs(build_convolution(), "relu", "norm x"), "relu: has 2 operands, but Relu has 1"),
        (build_nameless_node, "Relu: has 0 results, but Relu has 1"),
        (build_fractional_axis, "w_Q: has an attribute axis of the type FLOAT, but QuantizeLinear takes INT"),
        (
            lambda: truncate_field(build_branches(make_node("Neg", "x", "end")), "out", "attribute"),
            "out: lacks else_branch, then_branch, required by If",
        ),
    ],
)
def test_find_violations_malformed_node_reported_alone(planted, message):
    """For malformed nodes, nothing else is reported."""
    assert find_messages(planted()) == [f"[form] {message}. Other rules are checked after this is fixed."]


def test_check_empty_file_reported(tmp_path):
    """An empty file is reported as empty."""
    (tmp_path / "empty.onnx").touch()
    found = [str(violation) for violation in TensorRt().check(tmp_path / "empty.onnx")]
    assert "[empty] the file: it has no nodes, so there is nothing to build. Export the model again." in found


def test_find_violations_inputs_without_rank_checked():
    """A file whose inputs have no rank is still checked."""
    model = set_constant(make_input(build_convolution(), "x", Kind.FLOAT, None), "x_zero", 1, Kind.INT8)
    assert {violation.rule for violation in find_violations(model)} == {"static-rank", "zero-point"}


def test_find_violations_recursive_function_reported():
    """A function that calls itself is reported."""
    model = build_in_local_function()
    model.functions[0].node[0].op_type, model.functions[0].node[0].domain = "Pair", "local"
    assert any(
        "ONNX rejects it: Cycle detected in model-local function references" in line for line in find_messages(model)
    )


def build_operator_chain(operator, times, operands=1):
    """A quantized value that passes through a chain of operators before a product."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", 4, 32))
    attributes = {"axis": 0} if operator == "Concat" else {}
    for number in range(times):
        x = sketch.node(operator, f"step{number}", *[x] * operands, **attributes)
    x = x if operands == 1 else sketch.quantize(x)
    return sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 32, 32)))


@pytest.mark.slow_cases("Identity-3000-1")
@pytest.mark.parametrize(
    ("operator", "times", "operands"),
    [("Identity", 3000, 1), ("Mul", 3000, 2), ("Concat", 40, 2)],
)
def test_find_violations_long_chain_of_moves_passes(operator, times, operands):
    """A tensor may pass through thousands of nodes."""
    assert find_messages(build_operator_chain(operator, times, operands)) == []


def test_find_violations_weight_permuted_often_keeps_axis():
    """A weight may be transposed thousands of times, and its axis is known."""
    sketch = Sketch()
    w = sketch.weight("w", 32, 32, channels=32, axis=0)
    for number in range(3001):
        w = sketch.node("Transpose", f"turned{number}", w, perm=[1, 0])
    model = sketch.model(sketch.node("MatMul", "out", sketch.quantize(sketch.input("x", 4, 32)), w))
    assert find_messages(model) == []
    find(model, "turned3000").attribute[0].ints[:] = [0, 1]
    assert [violation.rule for violation in find_violations(model)] == ["weight-axis"]


@pytest.mark.parametrize(
    "operators", ["Identity", "Mul", "Relu", "Concat", "Identity Transpose", "Add Add", "Concat Concat"]
)
def test_find_violations_cycle_reported_and_ends(operators):
    """Tensors in a cycle are reported, and the check ends."""
    sketch = Sketch()
    x, kinds = sketch.quantize(sketch.input("x", 32, 32)), operators.split()
    for number, kind in enumerate(kinds):
        before = f"step{(number - 1) % len(kinds)}"
        others = {"Mul": [x], "Concat": [x], "Add": [sketch.constant(f"c{number}", [32], 0.5)]}.get(kind, [])
        sketch.node(kind, f"step{number}", before, *others, **({"axis": 0} if kind == "Concat" else {}))
    sketch.node("Conv", "conv", sketch.quantize("step0"), sketch.weight("w", 32, 32))
    found = find_messages(sketch.model(sketch.node("MatMul", "out", "conv", "step0")))
    assert "Nodes in a graph must be topologically sorted" in found[0]


def test_find_violations_tensor_made_twice_reported():
    """A tensor that two nodes make, one from itself, is reported."""
    model = insert_operator(build_convolution(), "x_DQ", "conv", "Identity")
    model.graph.node.append(make_node("Identity", "moved", "moved"))
    assert "'moved' has been used as output names multiple times" in find_messages(model)[0]


def move_to_external_file(model, folder, size_threshold=0):
    """The constants of a model are in a file next to it."""
    tensors = [*model.graph.initializer]
    for graph in (model.graph, *(a.g for n in model.graph.node for a in n.attribute if a.HasField("g"))):
        tensors += [a.t for n in graph.node for a in n.attribute if a.HasField("t")]
    for tensor in tensors:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    path = folder / "net.onnx"
    form = {"save_as_external_data": True, "location": "net.bin", "convert_attribute": True}
    onnx.save(model, path, size_threshold=size_threshold, **form)
    assert (folder / "net.bin").exists()
    return path


@pytest.mark.parametrize("model", [build_convolution, build_convolution_with_constant_nodes])
def test_check_external_scales_read_from_other_folder(model, tmp_path):
    """Scales may be in an external file in another folder."""
    path = move_to_external_file(model(), tmp_path)
    assert TensorRt().check(path) == []
    assert predict_precisions(path)
    path = move_to_external_file(set_constant(model(), "w_scale", 0, shape=[16]), tmp_path)
    assert [violation.rule for violation in TensorRt().check(path)] == ["scale", "scale"]


def test_check_external_weights_not_read(tmp_path):
    """External weights are not read."""
    model = set_constant(build_convolution(), "table", 1, Kind.INT64, [40, 40])
    path = move_to_external_file(model, tmp_path, MAX_INLINE_BYTES)
    (tmp_path / "net.bin").unlink()
    assert TensorRt().check(path) == []


def test_check_missing_external_scale_raises(tmp_path):
    """Scales that cannot be read raise TargetError."""
    path = move_to_external_file(build_convolution(), tmp_path)
    (tmp_path / "net.bin").unlink()
    message = "the elements of 'x_scale' cannot be read: .*net.bin.*. Put the file next to"
    with pytest.raises(TargetError, match=message):
        TensorRt().check(path)


def test_check_external_sizes_read(tmp_path):
    """Sizes in an external file are read."""
    sketch = Sketch()
    w = sketch.weight("w", 32, 4, 8, channels=32, axis=0)
    w = sketch.node("Reshape", "flat", w, sketch.constant("sizes", [2], [-1, 32], Kind.INT64))
    model = sketch.model(sketch.node("MatMul", "out", sketch.quantize(sketch.input("x", 4, 32)), w))
    assert [violation.rule for violation in TensorRt().check(move_to_external_file(model, tmp_path))] == ["weight-axis"]


@pytest.mark.parametrize("move", ["Unsqueeze", "Reshape"])
def test_find_violations_axis_below_rank_reported(move):
    """An axis below the rank of a moved weight is reported."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE))
    places = [2, 3] if move == "Unsqueeze" else [16, 16, 1, 1]
    places = sketch.constant("places", [len(places)], places, Kind.INT64)
    w = sketch.node(move, "moved", sketch.weight("w", 16, 16, channels=16, axis=-5), places)
    found = find_messages(sketch.model(sketch.node("Conv", "out", x, w)))
    assert "[scale-shape] w_DQ: its axis -5 does not exist in a tensor with 2 dims" in found


def test_find_violations_unknown_type_reported_by_number():
    """Types that ONNX does not know are reported by number."""
    model = build_convolution()
    next(tensor for tensor in model.graph.initializer if tensor.name == "x_zero").data_type = 99
    assert any(
        "its quantized type is type 99, but TensorRT computes with INT8" in line for line in find_messages(model)
    )
    model = make_input(build_convolution(), "x", 99, IMAGE)
    assert "[data-type] x_Q: quantizes type 99, but only 32-bit and 16-bit floats are supported" in find_messages(model)


def test_find_violations_attribute_reference_outside_function():
    """An attribute that refers to a function outside of one is reported."""
    model = truncate_field(build_convolution(), "w_Q", "attribute")
    reference = onnx.AttributeProto(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="dim")
    find(model, "w_Q").attribute.append(reference)
    message = "w_Q: its attribute axis refers to 'dim' of a function, but the node is not in a function"
    assert find_messages(model) == [f"[form] {message}. Other rules are checked after this is fixed."]


def test_find_violations_variadic_operator_has_no_maximum():
    """Variadic operators have no maximum number of operands."""
    assert (
        "joined: has 0 operands, but Concat has 1 or more"
        in find_messages(truncate_field(build_concatenation(), "joined", "input"))[0]
    )


@pytest.mark.parametrize("model", [build_convolution, build_convolution_with_constant_nodes])
def test_find_violations_truncated_constant_reported_once(model):
    """A constant with too few bytes is reported, and the check continues."""
    model = set_constant(model(), "w_zero", 1, Kind.INT8, [16])
    held = [*(a.t for n in model.graph.node for a in n.attribute if a.HasField("t")), *model.graph.initializer]
    tensor = next(one for one in held if one.data_type == Kind.FLOAT and not one.dims)
    tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=Kind.FLOAT, raw_data=b"\0\0"))
    found = find_violations(model)
    assert {violation.rule for violation in found} == {"valid-onnx", "zero-point"}
    assert [violation.rule for violation in found].count("valid-onnx") == 1
    message = (
        "the elements of 'x_scale' cannot be read: buffer size must be a multiple of element size. Export it again."
    )
    assert message in [violation.message for violation in found]


def test_find_violations_malformed_scale_not_compared():
    """A malformed scale is not compared with that of the inverse."""
    model = set_node_inputs(build_convolution(), "x_Q", "x other x_zero")
    model.graph.initializer.append(onnx.TensorProto(name="other", data_type=Kind.FLOAT, raw_data=b"\0\0"))
    assert [violation.rule for violation in find_violations(model)] == ["valid-onnx"]


def test_check_missing_unread_external_integers_pass(tmp_path):
    """Small external integer constants that no rule reads may be missing."""
    model = set_constant(build_convolution(), "table", 1, Kind.INT32, [16])
    path = move_to_external_file(model, tmp_path)
    held = onnx.load(path, load_external_data=False)
    table = next(tensor for tensor in held.graph.initializer if tensor.name == "table")
    next(entry for entry in table.external_data if entry.key == "location").value = "missing.bin"
    path.write_bytes(held.SerializeToString())
    assert TensorRt().check(path) == []


def build_growing_concat(times):
    """A concatenation that grows by one quantized value in each step."""
    sketch = Sketch()
    whole = sketch.quantize(sketch.input("x", 4, 32))
    for number in range(times):
        whole = sketch.node("Concat", f"h{number}", whole, sketch.quantize(sketch.input(f"x{number}", 4, 32)), axis=0)
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(whole), sketch.weight("w", 32, 32)))


def test_find_violations_joined_chain_visited_once(monkeypatch):
    """Tensors that are joined in turn are visited once."""
    seen = []
    look, read = OnnxFile.dequantizer, onnx_file.read_elements
    monkeypatch.setattr(OnnxFile, "dequantizer", lambda file, name: (seen.append(name), look(file, name))[1])
    monkeypatch.setattr(onnx_file, "read_elements", lambda tensor, _: (seen.append(tensor.name), read(tensor, _))[1])
    counts = []
    for times in (20, 40):
        seen.clear()
        assert find_messages(build_growing_concat(times)) == []
        counts.append(len(seen))
        assert seen.count("x0_scale") == 1
    assert counts[1] <= 2 * counts[0]


def test_find_violations_functions_of_other_opset_checked():
    """Functions of another opset are checked."""

    def build_function_of_opset(version, zero=0):
        model = build_in_local_function(zero)
        model.functions[0].opset_import[0].version = version
        return model

    assert find_messages(build_function_of_opset(13)) == []
    assert {violation.rule for violation in find_violations(build_function_of_opset(13, 1))} == {"zero-point"}
    found = [
        violation.message
        for violation in find_violations(build_function_of_opset(19))
        if violation.rule != "all-inputs"
    ]
    assert len(found) == 1
    assert "FunctionOp imports version 19 whereas model imports version 17" in found[0]


@pytest.mark.parametrize("is_node", [False, True])
def test_find_violations_malformed_branch_constant_once(is_node):
    """A malformed constant of a branch is reported once."""
    odd = onnx.TensorProto(name="odd", data_type=Kind.INT64, dims=[2], raw_data=b"\0" * 9)
    first = [make_node("Constant", "", "odd", value=odd)] if is_node else []
    model = build_branches(*first, make_node("Reshape", "x odd", "end"))
    graph = find(model, "out").attribute[0].g
    graph.initializer.extend([] if is_node else [odd])
    found = find_violations(model)
    assert [violation.rule for violation in found] == ["valid-onnx"]
    assert "the elements of 'odd' cannot be read" in found[0].message


def test_check_external_constants_of_one_name_per_branch(tmp_path):
    """Each branch may have an external constant of the same name."""

    def build_branch(*shape):
        """Return elements gathered from a constant, multiplied, and the constant itself."""
        rows = helper.make_tensor("rows", Kind.INT64, [1], [0])
        table = numpy_helper.from_array(np.full(shape, 0.5, np.float32), "w")
        deeper = helper.make_graph([make_node("Identity", "w", "deep")], "deeper", [], [])
        deeper.output.append(helper.make_tensor_value_info("deep", Kind.FLOAT, shape))
        nodes = [make_node("Gather", "w rows", "row", axis=1), make_node("MatMul", "x w", "end")]
        nodes.append(make_node("If", "flag", "deepest", then_branch=deeper, else_branch=deeper))
        shapes = {"end": [4, shape[1]], "row": [shape[0], 1], "w": shape}
        ends = [helper.make_tensor_value_info(name, Kind.FLOAT, sides) for name, sides in shapes.items()]
        return helper.make_graph(nodes, "branch", [], ends, [table, rows])

    sketch = Sketch()
    flag = sketch.input("flag", kind=Kind.BOOL)
    sketch.nodes.append(
        make_node("If", flag, "out row w", then_branch=build_branch(32, 4), else_branch=build_branch(32, 8))
    )
    sketch.input("x", 4, 32)
    model = sketch.model("out")
    assert find_messages(model) == []
    path = tmp_path / "net.onnx"
    for attribute in find(model, "out").attribute:
        for tensor in attribute.g.initializer:
            if tensor.name == "w":
                (tmp_path / attribute.name).write_bytes(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = Kind.EXTERNAL
                tensor.external_data.add(key="location", value=attribute.name)
    path.write_bytes(model.SerializeToString())
    assert TensorRt().check(path) == []


def test_check_truncated_file_raises_or_reports_opset(tmp_path):
    """A truncated file raises, or is reported without an opset."""
    path, whole = tmp_path / "net.onnx", build_convolution().SerializeToString()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TargetError, match=r"net.onnx as an ONNX file: .*. Export or copy it again"):
        TensorRt().check(path)
    path.write_bytes(whole[:-6])  # all but the opset, which comes last
    found = [str(violation) for violation in TensorRt().check(path)]
    assert "[opset] the file: it declares no opset of ONNX's operators. Export the model again." in found


def test_predict_precisions_weight_only_layer_float(tmp_path):
    """A layer with only its weight quantized runs in float."""
    held = [
        numpy_helper.from_array(np.ones((4, 4), np.int8), "w"),
        numpy_helper.from_array(np.ones(4, np.float32), "s"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["held"], "held", axis=0),
        helper.make_node("Transpose", ["held"], ["turned"], "linear/Transpose"),
        helper.make_node("MatMul", ["x", "turned"], ["y"], "linear/MatMul"),
    ]
    ends = [[helper.make_tensor_value_info(name, Kind.FLOAT, [2, 3, 4])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "linear", *ends, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "net.onnx")
    assert predict_precisions(tmp_path / "net.onnx")["linear"].startswith("float: its input is not quantized")
