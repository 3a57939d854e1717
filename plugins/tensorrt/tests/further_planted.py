"""Faults and similar correct graphs that a second reader of the rules found, in the form of `planted.py`."""

from functools import partial

from onnx import TensorProto as Kind
from onnx import helper
from planting import (
    bypass_qdq_pair,
    drop,
    find,
    insert_operator,
    prepend_nodes,
    set_axis,
    set_constant,
    set_node_inputs,
)
from sketches import (
    IMAGE,
    Sketch,
    build_blockwise,
    build_branches,
    build_convolution,
    build_perceptron,
    build_residual,
    make_filled_tensor,
    make_node,
)

AXIS = helper.make_attribute("axis", 0)


def build_binary_operator(operator, *other, **attributes):
    """A quantized tensor and a constant or another quantized tensor, and a quantized result of both."""
    sketch = Sketch()
    one = sketch.quantize(sketch.input("x", 4, 32))
    other = sketch.constant("other", other, 0.5) if other else sketch.quantize(sketch.input("y", 4, 32))
    result = sketch.quantize(sketch.node(operator, "result", one, other, **attributes))
    return sketch.model(sketch.node("MatMul", "out", result, sketch.weight("w", 64 if attributes else 32, 32)))


def build_decomposed_norm(pair_after):
    """A convolution and its norm as a product and a sum, with a pair after one of the three."""
    sketch = Sketch()
    tensor = sketch.quantize(sketch.input("x", *IMAGE))
    constants = [sketch.constant(name, [16, 1, 1], 0.5) for name in ("gain", "shift")]
    for operator, name, other in (
        ("Conv", "conv", sketch.weight("w", 16, 16, 1, 1)),
        ("Mul", "scaled", constants[0]),
        ("Add", "shifted", constants[1]),
    ):
        tensor = sketch.node(operator, name, tensor, other)
        tensor = sketch.quantize(tensor) if name == pair_after else tensor
    relu = sketch.quantize(sketch.node("Relu", "relu", tensor))
    return sketch.model(sketch.node("Conv", "out", relu, sketch.weight("v", 16, 16, 1, 1)))


def build_reshape(length):
    """A reshape with as many dims as an input has elements."""
    sketch = Sketch()
    inputs = sketch.input("x", 4, 32), sketch.input("sizes", length, kind=Kind.INT64)
    return sketch.model(sketch.node("Reshape", "out", *inputs))


def build_cast_to_int8():
    sketch = Sketch()
    integers = sketch.node("Cast", "x_Q", sketch.input("x", *IMAGE), to=Kind.INT8)
    scale, zero = sketch.constant("scale", [], 0.05), sketch.constant("zero", [], 0, Kind.INT8)
    x = sketch.node("DequantizeLinear", "x_DQ", integers, scale, zero)
    return sketch.model(sketch.node("Conv", "out", x, sketch.weight("w", 16, 16, 1, 1)))


def build_float_convolution(kind=Kind.FLOAT, stored_kind=None, **blocks):
    """A float convolution, with a float weight or a low-bit one."""
    sketch = Sketch(kind)
    x, shape = sketch.input("x", 4, 64, 8, 8), [64, 64, 1, 1]
    if stored_kind is None:
        return sketch.model(sketch.node("Conv", "out", x, sketch.constant("w", shape, 0.5)))
    scales = [64, 1, 1, 1] if blocks else [64]
    w = sketch.add_stored_weight("w", shape, scales, stored_kind, axis=1 if blocks else 0, **blocks)
    return sketch.model(sketch.node("Conv", "out", x, w), 21)


def build_saturating_cast(saturate):
    model = build_perceptron(target=Kind.FLOAT8E4M3FN, opset=19)
    find(model, "x_Q").attribute.append(helper.make_attribute("saturate", saturate))
    return model


def build_other_scale(scale, kind=Kind.FLOAT, opset=17):
    """A quantizer with another scale than its inverse."""
    return set_node_inputs(set_constant(build_convolution(opset), "other", scale, kind), "x_Q", "x other x_zero")


def build_padded(*filler, **attributes):
    """A pad between a pair and the convolution that it is for."""
    sketch = Sketch()
    pads = sketch.constant("pads", [8], [0, 0, 1, 1, 0, 0, 1, 1], Kind.INT64)
    fillers = [sketch.constant("filler", [], value) for value in filler]
    x = sketch.quantize(sketch.input("x", *IMAGE))
    x = sketch.node("Pad", "padded", x, pads, *fillers, **attributes)
    return sketch.model(sketch.node("Conv", "out", x, sketch.weight("w", 16, 16, 3, 3)))


def build_nested_concat(odd=None):
    """Nested concatenations with one scale, except for at most one operand."""
    sketch = Sketch()
    a, b, c = (sketch.quantize(sketch.input(name, *IMAGE)) for name in "abc")
    inner = sketch.node("Concat", "inner", a, b, axis=1)
    outer = sketch.quantize(sketch.node("Concat", "outer", inner, c, axis=1))
    model = sketch.model(sketch.node("Conv", "out", outer, sketch.weight("w", 16, 48, 1, 1)))
    return set_constant(model, f"{odd}_scale", 0.1) if odd else model


def build_shared_weight():
    """A weight of two layers, each with scales along another dim."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", 4, 32))
    product = sketch.node("MatMul", "product", x, sketch.weight("w", 32, 32, channels=32, axis=1))
    names = sketch.constant("t_scale", [32], 0.05), sketch.constant("t_zero", [32], 0, Kind.INT8)
    sketch.node("QuantizeLinear", "t_Q", "w", *names, axis=0)
    again = sketch.node("DequantizeLinear", "t_DQ", "t_Q", *names, axis=0)
    relu = sketch.quantize(sketch.node("Relu", "relu", product))
    return sketch.model(sketch.node("Gemm", "out", relu, again, transB=1))


def build_transposed_and_flattened_weight():
    """A weight with scales along a dim that a transpose moves to the front, and a reshape keeps there."""
    sketch = Sketch()
    w = sketch.node("Transpose", "turned", sketch.weight("w", 4, 32, 8, channels=32, axis=1), perm=[1, 0, 2])
    w = sketch.node("Reshape", "flat", w, sketch.constant("sizes", [2], [32, 32], Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(sketch.input("x", 4, 32)), w))


def build_int4_weight_first():
    sketch = Sketch(Kind.FLOAT16)
    w = sketch.add_stored_weight("w", [128, 128], [128, 2], Kind.INT4, axis=1, block_size=64)
    return sketch.model(sketch.node("MatMul", "out", w, sketch.input("x", 128, 4)), 21)


def build_global_pooling():
    sketch = Sketch()
    pooled = sketch.quantize(sketch.node("GlobalMaxPool", "pool", sketch.quantize(sketch.input("x", *IMAGE))))
    return sketch.model(sketch.node("Conv", "out", pooled, sketch.weight("w", 16, 16, 1, 1)))


def build_in_local_function(zero=0):
    """The perceptron with a local function as its first Q/DQ pair."""
    model = set_constant(build_perceptron(), "x_zero", zero, Kind.INT8)
    nodes = [make_node("QuantizeLinear", "a s z", "q"), make_node("DequantizeLinear", "q s z", "b")]
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("local", "Pair", ["a", "s", "z"], ["b"], nodes, opsets))
    drop(model, "x_Q", "x_DQ")
    model.graph.node.insert(0, make_node("Pair", "x x_scale x_zero", "x_DQ", domain="local"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def build_convolution_with_two_readers():
    """A convolution that a layer and an activation read."""
    sketch = Sketch()
    w, v = (sketch.weight(name, 16, 16, 1, 1) for name in "wv")
    start = sketch.quantize(sketch.node("Conv", "conv", sketch.quantize(sketch.input("x", *IMAGE)), w))
    one, other = (
        sketch.node("Conv", "layer", start, v),
        sketch.node("Sigmoid", "gate", sketch.node("Relu", "relu", start)),
    )
    return sketch.model(sketch.node("Mul", "out", one, other))


def build_gather():
    """Rows of a constant table, which are computed."""
    sketch = Sketch()
    rows = sketch.node("Gather", "rows", sketch.constant("table", [8, 32], 0.5), sketch.input("at", 4, kind=Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(rows, 32), sketch.weight("w", 32, 32)))


def build_int8_gather():
    """Rows of a constant INT8 table, which are computed."""
    model = set_node_inputs(build_gather(), "rows_Q", "table rows_scale rows_zero")
    model = set_node_inputs(set_node_inputs(model, "rows", "rows_Q at"), "rows_DQ", "rows rows_scale rows_zero")
    model.graph.node.insert(1, model.graph.node.pop(0))
    return model


def build_float_residual():
    """A float convolution, added to a tensor that is quantized for an INT8 convolution."""
    sketch = Sketch()
    relu = sketch.node("Relu", "relu", sketch.input("x", *IMAGE))
    sketch.node("Conv", "side", sketch.quantize(relu), sketch.weight("w", 16, 16, 1, 1))
    branch = sketch.node("Conv", "branch", sketch.input("y", *IMAGE), sketch.constant("v", [16, 16, 1, 1], 0.5))
    return sketch.model(sketch.node("Mul", "out", "side", sketch.node("Add", "add", branch, relu)))


def build_float32_scale(scale):
    """The perceptron in float16; its first scale is cast from float32."""
    model = set_constant(build_perceptron(Kind.FLOAT16, opset=19), "wide", scale)
    return prepend_nodes(model, make_node("Cast", "wide", "x_scale", to=Kind.FLOAT16))


def build_permuted_scale(operator, scales, *shape_or_order):
    """The convolution with weight scales that are moved or expanded from a constant."""
    model = set_constant(
        set_constant(build_convolution(), "element", 0.05, shape=scales),
        "shape_or_order",
        shape_or_order,
        Kind.INT64,
        [len(shape_or_order)],
    )
    return prepend_nodes(model, make_node(operator, "element shape_or_order", "w_scale"))


def build_transposed_int8_weight(axis=1):
    """A weight that is transposed between quantizer and dequantizer, with one scale per input channel."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", 4, 32))
    scale, zero = sketch.constant("w_scale", [32], 0.05), sketch.constant("w_zero", [32], 0, Kind.INT8)
    w = sketch.node("QuantizeLinear", "w_Q", sketch.constant("w", [32, 32], 0.5), scale, zero, axis=0)
    w = sketch.node("Transpose", "turned", w, perm=[1, 0])
    w = sketch.node("DequantizeLinear", "w_DQ", w, scale, zero, axis=axis)
    return sketch.model(sketch.node("MatMul", "out", x, w))


def build_int8_branches():
    """Branches that both return INT8."""
    scale = make_node("Constant", "", "s", value=make_filled_tensor("", Kind.FLOAT, [], 0.05))
    zero = make_node("Constant", "", "z", value=make_filled_tensor("", Kind.INT8, [], 0))
    model = build_branches(scale, zero, make_node("QuantizeLinear", "x s z", "end"))
    otherwise, then = (attribute.g for attribute in find(model, "out").attribute)
    then.node[0].CopyFrom(make_node("Cast", "x", "end", to=Kind.INT8))
    for graph in (model.graph, then, otherwise):
        graph.output[0].type.tensor_type.elem_type = Kind.INT8
    return model


X, W, V, RELU = (f"{tensor}_Q {tensor}_DQ" for tensor in ("x", "w", "v", "relu"))
FURTHER = {
    "float4 at opset 21": (
        partial(build_blockwise, weight=Kind.FLOAT4E2M1, opset=21, block=16),
        "type-needs-opset valid-onnx",
        "w_DQ FILE",
    ),
    "float16 at opset 17": (
        partial(build_perceptron, Kind.FLOAT16),
        "scale-type type-needs-opset valid-onnx",
        f"{X} {W} {V} {RELU} FILE",
    ),
    "scales of four dims": (
        lambda: set_constant(build_convolution(), "w_scale", 0.05, shape=[16, 1, 1, 1]),
        "scale-shape",
        W,
    ),
    "eight scales of sixteen channels": (
        lambda: set_constant(build_convolution(), "w_scale", 0.05, shape=[8]),
        "scale-shape",
        W,
    ),
    "one zero point of sixteen scales": (
        lambda: set_constant(build_convolution(), "w_zero", 0, Kind.INT8),
        "scale-shape",
        W,
    ),
    "scales of other blocks": (
        lambda: set_constant(build_blockwise(), "w_scale", 0.05, Kind.FLOAT16, [128, 2]),
        "scale-shape",
        "w_DQ",
    ),
    "axis of no dim": (lambda: set_axis(build_convolution(), "v_DQ", 7), "scale-shape", "v_DQ"),
    "scales along the first dim, transposed and flattened": (
        build_transposed_and_flattened_weight,
        "weight-axis",
        "w_DQ",
    ),
    "another scale than its inverse": (lambda: build_other_scale(0.1), "pair", "x_Q"),
    "scale in float16": (lambda: build_other_scale(0.05, Kind.FLOAT16, 23), "scale-type", "x_Q"),
    "INT8 of a Cast": (build_cast_to_int8, "pair", "x_DQ"),
    "float8 by int8": (
        lambda: set_constant(build_perceptron(opset=19), "x_zero", 0, Kind.FLOAT8E4M3FN),
        "all-inputs int8-with-float8",
        "gemm x_Q",
    ),
    "float8 that becomes infinite": (partial(build_saturating_cast, 0), "saturation", "x_Q"),
    "float64": (partial(build_float_convolution, Kind.DOUBLE), "data-type", "out"),
    "rank of an input's length": (partial(build_reshape, "n"), "static-rank", "out"),
    "Add with a float constant": (partial(build_binary_operator, "Add", 32), "all-operands", "result"),
    "Mul by a float constant": (partial(build_binary_operator, "Mul", 32), "all-operands", "result"),
    "Concat with a float constant": (partial(build_binary_operator, "Concat", 4, 32, axis=1), "all-operands", "result"),
    "Concat of Concat and another scale": (partial(build_nested_concat, "c"), "concat-scales", "outer"),
    "Concat of Concat with float": (
        lambda: bypass_qdq_pair(build_nested_concat(), "a", "inner"),
        "all-operands",
        "outer",
    ),
    "Concat of Concat of another scale": (partial(build_nested_concat, "a"), "concat-scales", "outer"),
    "identity in float": (lambda: set_node_inputs(build_residual(), "add", "branch relu"), "residual", "add"),
    "identity in float, permuted": (
        lambda: insert_operator(set_node_inputs(build_residual(), "add", "branch relu"), "relu", "add", "Squeeze"),
        "residual",
        "add",
    ),
    "pair before a norm by hand": (
        partial(build_decomposed_norm, "conv"),
        "all-operands before-fusion",
        "conv_Q scaled",
    ),
    "pair within a norm by hand": (
        partial(build_decomposed_norm, "scaled"),
        "all-operands before-fusion",
        "scaled_Q shifted",
    ),
    "pair after a norm by hand": (partial(build_decomposed_norm, "shifted"), "before-fusion", "shifted_Q"),
    "pair before a Pad of ones": (partial(build_padded, 1.0), "all-inputs isolated", "x_Q out"),
    "rows of a table per channel": (build_gather, "activation-per-tensor", "rows_Q rows_DQ"),
    "rows of a table of INT8 per channel": (build_int8_gather, "activation-per-tensor", "rows_DQ"),
    "zero point of one in a function": (partial(build_in_local_function, 1), "zero-point", "q__1 b__1"),
    "int8 weight of a convolution of floats": (
        partial(build_float_convolution, stored_kind=Kind.INT8),
        "all-inputs",
        "out",
    ),
    "scale that a Cast makes 0": (partial(build_float32_scale, 1e-9), "scale", X),
    "scale that is repeated along axis 1": (
        lambda: set_axis(set_axis(build_permuted_scale("Expand", [], 16), "w_Q", 1), "w_DQ", 1),
        "weight-axis",
        W,
    ),
    "INT8 of a branch": (build_int8_branches, "pair", "end"),
    "transposed INT8 values, of the other axis": (partial(build_transposed_int8_weight, 0), "weight-axis", "w_DQ"),
}

NEAR = {
    "scale that is cast": partial(build_float32_scale, 0.05),
    "scales that are reshaped": partial(build_permuted_scale, "Reshape", [4, 4], 16),
    "scales that are squeezed": partial(build_permuted_scale, "Squeeze", [16, 1], 1),
    "scale that is repeated": partial(build_permuted_scale, "Expand", [], 16),
    "transposed INT8 values": build_transposed_int8_weight,
    "float4 at opset 23": partial(build_blockwise, weight=Kind.FLOAT4E2M1, opset=23, block=16),
    "scale of nearly its inverse": lambda: build_other_scale(0.0501),
    "zero point of one dim": lambda: set_constant(build_convolution(), "x_zero", 0, Kind.INT8, [1]),
    "axis of one scale": lambda: (model := build_perceptron(), find(model, "x_Q").attribute.append(AXIS))[0],
    "negative axis of the inverse": lambda: set_axis(build_convolution(), "w_DQ", -4),
    "float8 that is clipped": partial(build_saturating_cast, 1),
    "rank of a fixed length": partial(build_reshape, 2),
    "convolution of floats": build_float_convolution,
    **{f"{operator} of two": partial(build_binary_operator, operator) for operator in ("Max", "Min", "Sub", "Div")},
    "GlobalMaxPool": build_global_pooling,
    "Concat of Concat": build_nested_concat,
    "residual of a convolution of floats": build_float_residual,
    "norm by hand": partial(build_decomposed_norm, None),
    "pair that a layer and an activation read": build_convolution_with_two_readers,
    "Pad": build_padded,
    "Pad of zeros": partial(build_padded, 0.0),
    "Pad that reflects": partial(build_padded, mode="reflect"),
    "weight along two dims": build_shared_weight,
    "int4 weight as the first operand": build_int4_weight_first,
    "function": build_in_local_function,
}
