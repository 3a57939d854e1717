"""Faults and similar correct graphs that a second reader of the rules found, in the form of `planted.py`."""

from functools import partial

from onnx import TensorProto as Kind
from onnx import helper
from planting import along, between, bypassed, computed, drop, find, given, reading
from sketches import (
    IMAGE,
    Sketch,
    blockwise,
    branches,
    convolution,
    filled,
    node,
    perceptron,
    residual,
)

AXIS = helper.make_attribute("axis", 0)


def of_two(operator, *other, **attributes):
    """A quantized tensor and a constant or another quantized tensor, and a quantized result of both."""
    sketch = Sketch()
    one = sketch.quantized(sketch.input("x", 4, 32))
    other = sketch.constant("other", other, 0.5) if other else sketch.quantized(sketch.input("y", 4, 32))
    result = sketch.quantized(sketch.node(operator, "result", one, other, **attributes))
    return sketch.model(sketch.node("MatMul", "out", result, sketch.weight("w", 64 if attributes else 32, 32)))


def norm_by_hand(pair_behind):
    """A convolution and its norm as a product and a sum, with a pair behind one of the three."""
    sketch = Sketch()
    tensor = sketch.quantized(sketch.input("x", *IMAGE))
    constants = [sketch.constant(name, [16, 1, 1], 0.5) for name in ("gain", "shift")]
    for operator, name, other in (
        ("Conv", "conv", sketch.weight("w", 16, 16, 1, 1)),
        ("Mul", "scaled", constants[0]),
        ("Add", "shifted", constants[1]),
    ):
        tensor = sketch.node(operator, name, tensor, other)
        tensor = sketch.quantized(tensor) if name == pair_behind else tensor
    relu = sketch.quantized(sketch.node("Relu", "relu", tensor))
    return sketch.model(sketch.node("Conv", "out", relu, sketch.weight("v", 16, 16, 1, 1)))


def reshaped(length):
    """A reshape with as many dims as an input has elements."""
    sketch = Sketch()
    inputs = sketch.input("x", 4, 32), sketch.input("sizes", length, kind=Kind.INT64)
    return sketch.model(sketch.node("Reshape", "out", *inputs))


def cast_to_integers():
    sketch = Sketch()
    integers = sketch.node("Cast", "x_Q", sketch.input("x", *IMAGE), to=Kind.INT8)
    scale, zero = sketch.constant("scale", [], 0.05), sketch.constant("zero", [], 0, Kind.INT8)
    x = sketch.node("DequantizeLinear", "x_DQ", integers, scale, zero)
    return sketch.model(sketch.node("Conv", "out", x, sketch.weight("w", 16, 16, 1, 1)))


def float_convolution(kind=Kind.FLOAT, held=None, **blocks):
    """A convolution of floats, with a weight that is a float, too, or held in fewer bits."""
    sketch = Sketch(kind)
    x, shape = sketch.input("x", 4, 64, 8, 8), [64, 64, 1, 1]
    if held is None:
        return sketch.model(sketch.node("Conv", "out", x, sketch.constant("w", shape, 0.5)))
    scales = [64, 1, 1, 1] if blocks else [64]
    w = sketch.stored_weight("w", shape, scales, held, axis=1 if blocks else 0, **blocks)
    return sketch.model(sketch.node("Conv", "out", x, w), 21)


def saturating(saturate):
    model = perceptron(target=Kind.FLOAT8E4M3FN, opset=19)
    find(model, "x_Q").attribute.append(helper.make_attribute("saturate", saturate))
    return model


def other_scale(scale, kind=Kind.FLOAT, opset=17):
    """A quantizer with another scale than its inverse."""
    return reading(given(convolution(opset), "other", scale, kind), "x_Q", "x other x_zero")


def padded(*filler, **attributes):
    """A pad between a pair and the convolution that it is for."""
    sketch = Sketch()
    pads = sketch.constant("pads", [8], [0, 0, 1, 1, 0, 0, 1, 1], Kind.INT64)
    fillers = [sketch.constant("filler", [], value) for value in filler]
    x = sketch.quantized(sketch.input("x", *IMAGE))
    x = sketch.node("Pad", "padded", x, pads, *fillers, **attributes)
    return sketch.model(sketch.node("Conv", "out", x, sketch.weight("w", 16, 16, 3, 3)))


def joined_twice(odd=None):
    """Nested concatenations with one scale, except for at most one operand."""
    sketch = Sketch()
    a, b, c = (sketch.quantized(sketch.input(name, *IMAGE)) for name in "abc")
    inner = sketch.node("Concat", "inner", a, b, axis=1)
    outer = sketch.quantized(sketch.node("Concat", "outer", inner, c, axis=1))
    model = sketch.model(sketch.node("Conv", "out", outer, sketch.weight("w", 16, 48, 1, 1)))
    return given(model, f"{odd}_scale", 0.1) if odd else model


def tied():
    """A weight of two layers, each with scales along another dim."""
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", 4, 32))
    product = sketch.node("MatMul", "product", x, sketch.weight("w", 32, 32, channels=32, axis=1))
    names = sketch.constant("t_scale", [32], 0.05), sketch.constant("t_zero", [32], 0, Kind.INT8)
    sketch.node("QuantizeLinear", "t_Q", "w", *names, axis=0)
    again = sketch.node("DequantizeLinear", "t_DQ", "t_Q", *names, axis=0)
    relu = sketch.quantized(sketch.node("Relu", "relu", product))
    return sketch.model(sketch.node("Gemm", "out", relu, again, transB=1))


def turned_and_flattened():
    """A weight with scales along a dim that a transpose moves to the front, and a reshape keeps there."""
    sketch = Sketch()
    w = sketch.node("Transpose", "turned", sketch.weight("w", 4, 32, 8, channels=32, axis=1), perm=[1, 0, 2])
    w = sketch.node("Reshape", "flat", w, sketch.constant("sizes", [2], [32, 32], Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(sketch.input("x", 4, 32)), w))


def few_bits_first():
    sketch = Sketch(Kind.FLOAT16)
    w = sketch.stored_weight("w", [128, 128], [128, 2], Kind.INT4, axis=1, block_size=64)
    return sketch.model(sketch.node("MatMul", "out", w, sketch.input("x", 128, 4)), 21)


def pooled_whole():
    sketch = Sketch()
    pooled = sketch.quantized(sketch.node("GlobalMaxPool", "pool", sketch.quantized(sketch.input("x", *IMAGE))))
    return sketch.model(sketch.node("Conv", "out", pooled, sketch.weight("w", 16, 16, 1, 1)))


def in_a_function(zero=0):
    """The perceptron with a local function as its first Q/DQ pair."""
    model = given(perceptron(), "x_zero", zero, Kind.INT8)
    nodes = [node("QuantizeLinear", "a s z", "q"), node("DequantizeLinear", "q s z", "b")]
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("local", "Pair", ["a", "s", "z"], ["b"], nodes, opsets))
    drop(model, "x_Q", "x_DQ")
    model.graph.node.insert(0, node("Pair", "x x_scale x_zero", "x_DQ", domain="local"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def served_twice():
    """A convolution whose result a layer reads, and an activation."""
    sketch = Sketch()
    w, v = (sketch.weight(name, 16, 16, 1, 1) for name in "wv")
    start = sketch.quantized(sketch.node("Conv", "conv", sketch.quantized(sketch.input("x", *IMAGE)), w))
    one, other = (
        sketch.node("Conv", "layer", start, v),
        sketch.node("Sigmoid", "gate", sketch.node("Relu", "relu", start)),
    )
    return sketch.model(sketch.node("Mul", "out", one, other))


def gathered():
    """Rows of a table, which are computed, though the table is constant."""
    sketch = Sketch()
    rows = sketch.node("Gather", "rows", sketch.constant("table", [8, 32], 0.5), sketch.input("at", 4, kind=Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(rows, 32), sketch.weight("w", 32, 32)))


def integers_gathered():
    """Rows of a table of integers, which are computed, though the table is constant."""
    model = reading(gathered(), "rows_Q", "table rows_scale rows_zero")
    model = reading(reading(model, "rows", "rows_Q at"), "rows_DQ", "rows rows_scale rows_zero")
    model.graph.node.insert(1, model.graph.node.pop(0))
    return model


def float_residual():
    """A float convolution, added to a tensor that is quantized for an INT8 convolution."""
    sketch = Sketch()
    relu = sketch.node("Relu", "relu", sketch.input("x", *IMAGE))
    sketch.node("Conv", "side", sketch.quantized(relu), sketch.weight("w", 16, 16, 1, 1))
    branch = sketch.node("Conv", "branch", sketch.input("y", *IMAGE), sketch.constant("v", [16, 16, 1, 1], 0.5))
    return sketch.model(sketch.node("Mul", "out", "side", sketch.node("Add", "add", branch, relu)))


def wide_scale(scale):
    """The perceptron in float16; its first scale is cast from float32."""
    model = given(perceptron(Kind.FLOAT16, opset=19), "wide", scale)
    return computed(model, node("Cast", "wide", "x_scale", to=Kind.FLOAT16))


def moved_scale(operator, scales, *sides):
    """The convolution with weight scales that are moved or expanded from a constant."""
    model = given(given(convolution(), "held", 0.05, shape=scales), "sides", sides, Kind.INT64, [len(sides)])
    return computed(model, node(operator, "held sides", "w_scale"))


def integers_turned(axis=1):
    """A weight that is transposed between its quantizer, of one scale for each input channel, and its inverse."""
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", 4, 32))
    scale, zero = sketch.constant("w_scale", [32], 0.05), sketch.constant("w_zero", [32], 0, Kind.INT8)
    w = sketch.node("QuantizeLinear", "w_Q", sketch.constant("w", [32, 32], 0.5), scale, zero, axis=0)
    w = sketch.node("Transpose", "turned", w, perm=[1, 0])
    w = sketch.node("DequantizeLinear", "w_DQ", w, scale, zero, axis=axis)
    return sketch.model(sketch.node("MatMul", "out", x, w))


def integers_of_a_branch():
    """Branches that both return integers."""
    scale = node("Constant", "", "s", value=filled("", Kind.FLOAT, [], 0.05))
    zero = node("Constant", "", "z", value=filled("", Kind.INT8, [], 0))
    model = branches(scale, zero, node("QuantizeLinear", "x s z", "end"))
    otherwise, then = (attribute.g for attribute in find(model, "out").attribute)
    then.node[0].CopyFrom(node("Cast", "x", "end", to=Kind.INT8))
    for graph in (model.graph, then, otherwise):
        graph.output[0].type.tensor_type.elem_type = Kind.INT8
    return model


X, W, V, RELU = (f"{tensor}_Q {tensor}_DQ" for tensor in ("x", "w", "v", "relu"))
FURTHER = {
    "float4 at opset 21": (
        partial(blockwise, weight=Kind.FLOAT4E2M1, opset=21, block=16),
        "type-needs-opset valid-onnx",
        "w_DQ FILE",
    ),
    "float16 at opset 17": (
        partial(perceptron, Kind.FLOAT16),
        "scale-type type-needs-opset valid-onnx",
        f"{X} {W} {V} {RELU} FILE",
    ),
    "scales of four sides": (lambda: given(convolution(), "w_scale", 0.05, shape=[16, 1, 1, 1]), "scale-shape", W),
    "eight scales of sixteen channels": (lambda: given(convolution(), "w_scale", 0.05, shape=[8]), "scale-shape", W),
    "one zero point of sixteen scales": (lambda: given(convolution(), "w_zero", 0, Kind.INT8), "scale-shape", W),
    "scales of other blocks": (
        lambda: given(blockwise(), "w_scale", 0.05, Kind.FLOAT16, [128, 2]),
        "scale-shape",
        "w_DQ",
    ),
    "axis of no side": (lambda: along(convolution(), "v_DQ", 7), "scale-shape", "v_DQ"),
    "scales along the first side, turned and flattened": (turned_and_flattened, "weight-axis", "w_DQ"),
    "another scale than its inverse": (lambda: other_scale(0.1), "pair", "x_Q"),
    "half a scale": (lambda: other_scale(0.05, Kind.FLOAT16, 23), "scale-type", "x_Q"),
    "integers of a Cast": (cast_to_integers, "pair", "x_DQ"),
    "float8 by int8": (
        lambda: given(perceptron(opset=19), "x_zero", 0, Kind.FLOAT8E4M3FN),
        "all-inputs int8-beside-float8",
        "gemm x_Q",
    ),
    "float8 that becomes infinite": (partial(saturating, 0), "saturation", "x_Q"),
    "float64": (partial(float_convolution, Kind.DOUBLE), "data-type", "out"),
    "rank of an input's length": (partial(reshaped, "n"), "static-rank", "out"),
    "Add with a float constant": (partial(of_two, "Add", 32), "all-operands", "result"),
    "Mul by a float constant": (partial(of_two, "Mul", 32), "all-operands", "result"),
    "Concat with a float constant": (partial(of_two, "Concat", 4, 32, axis=1), "all-operands", "result"),
    "Concat of Concat and another scale": (partial(joined_twice, "c"), "concat-scales", "outer"),
    "Concat of Concat with float": (lambda: bypassed(joined_twice(), "a", "inner"), "all-operands", "outer"),
    "Concat of Concat of another scale": (partial(joined_twice, "a"), "concat-scales", "outer"),
    "identity in float": (lambda: reading(residual(), "add", "branch relu"), "residual", "add"),
    "identity in float, moved": (
        lambda: between(reading(residual(), "add", "branch relu"), "relu", "add", "Squeeze"),
        "residual",
        "add",
    ),
    "pair before a norm by hand": (partial(norm_by_hand, "conv"), "all-operands before-fusion", "conv_Q scaled"),
    "pair within a norm by hand": (partial(norm_by_hand, "scaled"), "all-operands before-fusion", "scaled_Q shifted"),
    "pair behind a norm by hand": (partial(norm_by_hand, "shifted"), "before-fusion", "shifted_Q"),
    "pair before a Pad of ones": (partial(padded, 1.0), "all-inputs isolated", "x_Q out"),
    "rows of a table per channel": (gathered, "activation-per-tensor", "rows_Q rows_DQ"),
    "rows of a table of integers per channel": (integers_gathered, "activation-per-tensor", "rows_DQ"),
    "zero point of one in a function": (partial(in_a_function, 1), "zero-point", "q__1 b__1"),
    "int8 weight of a convolution of floats": (partial(float_convolution, held=Kind.INT8), "all-inputs", "out"),
    "scale that a Cast makes 0": (partial(wide_scale, 1e-9), "scale", X),
    "scale that is repeated along axis 1": (
        lambda: along(along(moved_scale("Expand", [], 16), "w_Q", 1), "w_DQ", 1),
        "weight-axis",
        W,
    ),
    "integers of a branch": (integers_of_a_branch, "pair", "end"),
    "integers that are turned, of the other axis": (partial(integers_turned, 0), "weight-axis", "w_DQ"),
}

NEAR = {
    "scale that is cast": partial(wide_scale, 0.05),
    "scales that are reshaped": partial(moved_scale, "Reshape", [4, 4], 16),
    "scales that are squeezed": partial(moved_scale, "Squeeze", [16, 1], 1),
    "scale that is repeated": partial(moved_scale, "Expand", [], 16),
    "integers that are turned": integers_turned,
    "float4 at opset 23": partial(blockwise, weight=Kind.FLOAT4E2M1, opset=23, block=16),
    "scale of nearly its inverse": lambda: other_scale(0.0501),
    "zero point of one side": lambda: given(convolution(), "x_zero", 0, Kind.INT8, [1]),
    "axis of one scale": lambda: (model := perceptron(), find(model, "x_Q").attribute.append(AXIS))[0],
    "negative axis of the inverse": lambda: along(convolution(), "w_DQ", -4),
    "float8 that is clipped": partial(saturating, 1),
    "rank of a fixed length": partial(reshaped, 2),
    "convolution of floats": float_convolution,
    **{f"{operator} of two": partial(of_two, operator) for operator in ("Max", "Min", "Sub", "Div")},
    "GlobalMaxPool": pooled_whole,
    "Concat of Concat": joined_twice,
    "residual of a convolution of floats": float_residual,
    "norm by hand": partial(norm_by_hand, None),
    "pair that a layer and an activation read": served_twice,
    "Pad": padded,
    "Pad of zeros": partial(padded, 0.0),
    "Pad that reflects": partial(padded, mode="reflect"),
    "weight along two sides": tied,
    "int4 weight as the first operand": few_bits_first,
    "function": in_a_function,
}
