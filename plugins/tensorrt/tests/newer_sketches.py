"""Graphs of TensorRT's own operators, low-bit weights and newer operators, and with stale types."""

from functools import partial

from onnx import TensorProto as Kind
from onnx import helper
from planting import also_returning, between, drop, find, given, reading
from sketches import IMAGE, Sketch, blockwise, branches, convolution, filled, node, perceptron


def own(model, **names):
    """Replace quantizers and dequantizers by TensorRT's own ones, which have the type in their names."""
    for one in model.graph.node:
        if one.op_type in names:
            one.op_type, one.domain = names[one.op_type], "trt"
            del one.input[2:]
    model.opset_import.append(helper.make_opsetid("trt", 1))
    return model


def own_float8(model):
    return own(model, QuantizeLinear="TRT_FP8QuantizeLinear", DequantizeLinear="TRT_FP8DequantizeLinear")


def own_int4(block=64):
    model = own(blockwise(block=block), DequantizeLinear="TRT_INT4DequantizeLinear")
    del find(model, "w_DQ").attribute[1:]  # its shapes say how long the blocks are
    return model


def ended_by(operator, domain):
    """The convolution, and behind it a plugin."""
    model = convolution()
    model.graph.node.append(node(operator, "out", "boxes", domain=domain))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("boxes", Kind.FLOAT, IMAGE))
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def nvfp4(block=16, is_dynamic=True, is_held=True):
    """A product whose weight and input are float4, with scales of blocks in float8 that have a scale themselves."""
    sketch = Sketch()
    x, whole = sketch.input("x", 4, 64), sketch.constant("whole", [], 0.5)
    if is_dynamic:
        dynamic = node("TRT_FP4DynamicQuantize", f"{x} {whole}", "x_Q s", domain="trt", axis=-1, block_size=16)
        sketch.nodes.append(dynamic)
        held = sketch.node("DequantizeLinear", "s_DQ", "s", whole)
        x = sketch.node("DequantizeLinear", "x_DQ", "x_Q", held, axis=-1, block_size=16, domain="trt")
    scales = sketch.constant("w_scales", [64 // block, 64], 2.0, Kind.FLOAT8E4M3FN)
    scales = sketch.node("DequantizeLinear", "scales_DQ", scales, whole) if is_held else scales
    w = sketch.constant("w", [64, 64], 1.0, Kind.FLOAT4E2M1)
    w = sketch.node("DequantizeLinear", "w_DQ", w, scales, axis=0, block_size=block)
    return sketch.model(sketch.node("MatMul", "out", x, w), 24, [4, 64])


def mxfp8(block=32, integers=Kind.FLOAT8E4M3FN, scale=Kind.FLOAT8E8M0):
    """A product with a float8 weight and exponent-only block scales."""
    sketch = Sketch()
    scales = sketch.constant("w_scales", [64 // block, 64] if block else [], 2.0, scale)
    w = sketch.constant("w", [64, 64], 1.0, integers)
    blocks = {"axis": 0, "block_size": block} if block else {}
    w = sketch.node("DequantizeLinear", "w_DQ", w, scales, output_dtype=Kind.FLOAT, **blocks)
    return sketch.model(sketch.node("MatMul", "out", sketch.dequantized_dynamically("x", 4, 64), w), 25, [4, 64])


def own_mxfp8(block=32):
    """The same as TensorRT's own operators have it: exponents as bytes, and the input quantized as it comes.

    How long blocks are is said where the input is quantized only.
    """
    sketch = Sketch()
    x = sketch.dequantized_dynamically("x", 4, 64)
    w, scales = sketch.constant("w", [64, 64], 1.0, Kind.FLOAT8E4M3FN), sketch.constant("s", [64, 2], 0, Kind.UINT8)
    w = sketch.node("TRT_MXFP8DequantizeLinear", "w_DQ", w, scales, axis=-1, block_size=32, domain="trt")
    w = sketch.node("Transpose", "turned", w, perm=[1, 0])
    model = sketch.model(sketch.node("MatMul", "out", x, w), 21, [4, 64])
    for name in ("x_DQ", "w_DQ"):
        kept = [a for a in find(model, name).attribute if a.name != "block_size"]
        del find(model, name).attribute[:]
        find(model, name).attribute.extend(kept)
    next(a for a in find(model, "x_Q").attribute if a.name == "block_size").i = block
    return model


def quantized_in_blocks(block=64, other=None, kind=Kind.INT4):
    """A weight that the file holds in float, with a pair of blocks."""
    sketch = Sketch()
    scales = (
        sketch.constant("scales", [128 // block, 128], 0.05),
        sketch.constant("zeros", [128 // block, 128], 0, kind),
    )
    w = sketch.constant("w", [128, 128], 0.25)
    w = sketch.node("QuantizeLinear", "w_Q", w, *scales, axis=0, block_size=block)
    w = sketch.node("DequantizeLinear", "w_DQ", w, *scales, axis=0, block_size=other or block)
    return sketch.model(sketch.node("MatMul", "out", sketch.input("x", 4, 128), w), 21)


def with_stale_types(model, **stale):
    """The file states shapes that it had before it was changed."""
    model.graph.value_info.extend(helper.make_tensor_value_info(n, Kind.FLOAT, shape) for n, shape in stale.items())
    return model


def with_stale_branch():
    model = branches(node("Transpose", "x", "turned", perm=[1, 0]), node("Transpose", "turned", "end", perm=[1, 0]))
    for attribute in find(model, "out").attribute:
        attribute.g.value_info.append(helper.make_tensor_value_info("turned", Kind.INT64, [7]))
    return model


def attention(missing=""):
    """The Attention of opset 23 with quantized query, key and value, except for at most one of them."""
    sketch = Sketch()
    inputs = [sketch.input(name, 1, 4, 8, 16) for name in "qkv"]
    inputs = [x if x == missing else sketch.quantized(x) for x in inputs]
    return sketch.model(sketch.node("Attention", "out", *inputs), 23)


def einsum(equation="bik,kj->bij", axis=1, quantized=True):
    """An Einsum of an input and a weight."""
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", 2, 4, 32))
    w = sketch.weight("w", 32, 32, channels=32, axis=axis) if quantized else sketch.constant("w", [32, 32], 0.5)
    return sketch.model(sketch.node("Einsum", "out", x, w, equation=equation))


def moved(operator, *others, **attributes):
    """The Q/DQ pair of an input, the operators that move it, and the product that reads it."""
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", 4, 32))
    others = [sketch.constant(f"at{number}", *other, Kind.INT64) for number, other in enumerate(others)]
    x = sketch.node(operator, "moved", x, *others, **attributes)
    return sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 32, 32)))


def cast_behind(*tensors):
    """The perceptron in float16 with float32 scales: a Cast follows each pair."""
    model = perceptron(Kind.FLOAT16, opset=19)
    for tensor, consumer in (("w_DQ", "gemm"), ("v_DQ", "matmul")):
        scale = f"{tensor[0]}_scale"
        given(model, scale, 0.05, shape=[32])
        model.graph.initializer.append(helper.make_tensor(f"{tensor[0]}_whole", Kind.FLOAT, [32, 32], [0.25] * 1024))
        reading(model, f"{tensor[0]}_Q", f"{tensor[0]}_whole {scale} {tensor[0]}_zero")
        between(model, tensor, consumer, "Cast")
        cast = next(one for one in model.graph.node if "moved" in one.output)
        cast.attribute.append(helper.make_attribute("to", Kind.FLOAT16))
        cast.name = cast.output[0] = f"{tensor[0]}_cast"
        reader = find(model, consumer)
        reader.input[:] = [f"{tensor[0]}_cast" if name == "moved" else name for name in reader.input]
    drop(model, "w", "v")
    return model


def scaled_sizes(data=""):
    """A size that is halved in float64, next to data."""
    sketch = Sketch()
    x = sketch.input("x", "n", 32)
    half = sketch.constant("half", [], 0.5, Kind.DOUBLE)
    size = sketch.node("Cast", "wide", sketch.node("Shape", "shape", x), to=Kind.DOUBLE)
    size = sketch.node("Floor", "floored", sketch.node("Mul", "halved", size, half))
    size = sketch.node("Cast", "size", size, to=Kind.INT64)
    if data:
        x = sketch.node("Cast", "x64", x, to=Kind.DOUBLE)
        x = sketch.node("Cast", "x32", sketch.node("Mul", "scaled", x, half), to=Kind.FLOAT)
    starts = sketch.constant("zeros", [2], [0, 0], Kind.INT64)
    return sketch.model(sketch.node("Slice", "out", x, starts, size))


def in_two_types(first=Kind.INT8, second=Kind.FLOAT8E4M3FN):
    """Two layers, each with integers of its own type."""
    sketch = Sketch(target=first)
    tensor = sketch.node("MatMul", "one", sketch.quantized(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32))
    sketch.target = second
    tensor = sketch.quantized(sketch.node("Relu", "relu", tensor))
    return sketch.model(sketch.node("MatMul", "out", tensor, sketch.weight("v", 32, 32)), 21)


def int4_beside_float8():
    """A layer with a weight in int4 alone, and one in float8."""
    sketch = Sketch(target=Kind.FLOAT8E4M3FN)
    w = sketch.stored_weight("w", [128, 128], [2, 128], Kind.INT4, axis=0, block_size=64)
    tensor = sketch.node("Relu", "relu", sketch.node("MatMul", "one", sketch.input("x", 4, 128), w))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(tensor), sketch.weight("v", 128, 32)), 21)


def in_a_loop(axis=0, zero=0):
    """A loop with a quantized convolution in its body."""
    held = {"x_scale": 0.05, "x_zero": zero, "w": 0.2, "w_scale": 0.05, "w_zero": 0}
    shapes = {"w": [16, 16, 1, 1], "w_scale": [16], "w_zero": [16]}
    constants = [filled(n, Kind.INT8 if "zero" in n else Kind.FLOAT, shapes.get(n, []), v) for n, v in held.items()]
    nodes = [
        node("Identity", "on", "more"),
        node("QuantizeLinear", "state x_scale x_zero", "x_Q"),
        node("DequantizeLinear", "x_Q x_scale x_zero", "x_DQ"),
        node("QuantizeLinear", "w w_scale w_zero", "w_Q", axis=axis),
        node("DequantizeLinear", "w_Q w_scale w_zero", "w_DQ", axis=axis),
        node("Conv", "x_DQ w_DQ", "end"),
    ]
    flag, image = (partial(helper.make_tensor_value_info, elem_type=k, shape=s) for k, s in ((9, []), (1, IMAGE)))
    begin = [helper.make_tensor_value_info("turn", Kind.INT64, []), flag("on"), image("state")]
    body = helper.make_graph(nodes, "body", begin, [flag("more"), image("end")], constants)
    sketch = Sketch()
    turns, go = sketch.constant("turns", [], 2, Kind.INT64), sketch.constant("go", [], 1, Kind.BOOL)
    return sketch.model(sketch.node("Loop", "out", turns, go, sketch.input("x", *IMAGE), body=body), shape=IMAGE)


def weight_first(axis, **turned):
    """A Gemm whose weight comes first."""
    sketch = Sketch()
    w, x = sketch.weight("w", 32, 32, channels=32, axis=axis), sketch.quantized(sketch.input("x", 32, 4))
    return sketch.model(sketch.node("Gemm", "out", w, x, **turned))


def of_int32():
    """A layer whose weight is held as biases are."""
    sketch = Sketch()
    w = sketch.constant("w", [32, 32], 5, Kind.INT32)
    w = sketch.node("DequantizeLinear", "w_DQ", w, sketch.constant("w_scale", [], 0.5))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(sketch.input("x", 4, 32)), w))


def returning_moved():
    """Integers are returned, once they are turned."""
    model = also_returning(convolution(), "turned", Kind.INT8)
    model.graph.node.append(node("Transpose", "relu_Q", "turned", perm=[0, 2, 3, 1]))
    return model


def quantized_again(scale=0.05):
    """A second pair behind the first."""
    sketch = Sketch()
    x = sketch.quantized(sketch.quantized(sketch.input("x", 4, 32)))
    model = sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 32, 32)))
    return given(model, "x_DQ_scale", scale)


def scaled_up():
    """A Resize between Q/DQ pairs of one scale; a layer and a Concat read its result."""
    sketch = Sketch()
    x, scales = sketch.quantized(sketch.input("x", *IMAGE)), sketch.constant("scales", [4], [1, 1, 2, 2])
    sketch.nodes.append(helper.make_node("Resize", [x, "", scales], ["up"], "up", mode="nearest"))
    other = sketch.quantized(sketch.input("skip", 4, 16, 16, 16))
    whole = sketch.quantized(sketch.node("Concat", "joined", sketch.quantized("up"), other, axis=1))
    return sketch.model(sketch.node("Conv", "out", whole, sketch.weight("w", 16, 32, 1, 1)))


def heads():
    """Attention as it is written by hand: projected, divided into heads, and joined again."""
    sketch = Sketch()
    x, sides = sketch.quantized(sketch.input("x", 2, 8, 32)), sketch.constant("sides", [4], [2, 8, 4, 8], Kind.INT64)
    parts = []
    for name in "qkv":
        part = sketch.node("MatMul", name, x, sketch.weight(f"w{name}", 32, 32, channels=32, axis=1))
        part = sketch.node("Reshape", f"{name}_parts", part, sides)
        order = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        parts.append(sketch.quantized(sketch.node("Transpose", f"{name}_heads", part, perm=order)))
    logits = sketch.node("Mul", "scaled", sketch.node("MatMul", "logits", *parts[:2]), sketch.constant("s", [], 0.3))
    mixed = sketch.node("MatMul", "mixed", sketch.quantized(sketch.node("Softmax", "chances", logits)), parts[2])
    mixed = sketch.node("Transpose", "turned", mixed, perm=[0, 2, 1, 3])
    mixed = sketch.node("Reshape", "whole", mixed, sketch.constant("flat", [3], [2, 8, 32], Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(mixed), sketch.weight("wo", 32, 32)))


def dynamic_float8():
    """A float8 input with its type in an attribute, read by a dequantizer in TensorRT's domain."""
    sketch = Sketch(target=Kind.FLOAT8E4M3FN)
    types = {"output_type": Kind.FLOAT8E4M3FN, "scale_type": Kind.FLOAT}
    sketch.nodes.append(node("TRT_DynamicQuantize", sketch.input("x", 4, 64), "x_Q s", domain="trt", **types))
    x = sketch.node("DequantizeLinear", "x_DQ", "x_Q", "s", axis=-1, block_size=32, domain="trt")
    return sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 64, 64)), 21, [4, 64])


def of_a_plugin(kind):
    """The output of a plugin is quantized; only the file states its type."""
    sketch = Sketch()
    y = sketch.quantized(sketch.node("Region_TRT", "y", sketch.input("x", 4, 32), domain="trt"))
    model = sketch.model(sketch.node("MatMul", "out", y, sketch.weight("w", 32, 32)), shape=[4, 32])
    model.graph.value_info.append(helper.make_tensor_value_info("y", kind, [4, 32]))
    return model


def scaled_by_another():
    """Integers that were quantized as they came, with scales that were not."""
    model = nvfp4()
    model.graph.node.insert(0, node("ReduceMax", "x", "largest", keepdims=0))
    return reading(model, "x_DQ", "x_Q largest")


def narrow_within():
    """Values in bfloat16 between such in float32, before ONNX's operators took it."""
    sketch = Sketch()
    x = sketch.node("Cast", "narrow", sketch.input("x", 4, 32), to=Kind.BFLOAT16)
    return sketch.model(sketch.node("Cast", "out", sketch.node("HardSwish", "swish", x), to=Kind.FLOAT), 18, [4, 32])


def random_float64():
    sketch = Sketch()
    x = sketch.node("RandomUniform", "noise", dtype=Kind.DOUBLE, shape=[4, 32])
    return sketch.model(sketch.node("Cast", "out", x, to=Kind.FLOAT))


def quantized_in_a_branch():
    """A branch quantizes what is quantized outside."""
    sketch = Sketch()
    product = sketch.node("MatMul", "product", sketch.quantized(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32))
    pair = (
        node("QuantizeLinear", "x x_scale x_zero", "again_Q"),
        node("DequantizeLinear", "again_Q x_scale", "again_DQ"),
    )
    nodes = {
        "then_branch": [*pair, node("MatMul", "again_DQ w_DQ", "end")],
        "else_branch": [node("Abs", product, "end")],
    }
    ends = [helper.make_tensor_value_info("end", Kind.FLOAT, None)]
    graphs = {name: helper.make_graph(own, name, [], ends) for name, own in nodes.items()}
    return sketch.model(sketch.node("If", "out", sketch.input("flag", kind=Kind.BOOL), **graphs))


def cast_between(model, tensor, consumer, to):
    model = between(model, tensor, consumer, "Cast")
    next(one for one in model.graph.node if "moved" in one.output).attribute.append(helper.make_attribute("to", to))
    return model
