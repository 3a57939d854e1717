"""Graphs of TensorRT's own operators, low-bit weights and newer operators, and with stale types."""

from functools import partial

from onnx import TensorProto as Kind
from onnx import helper
from planting import add_output, drop, find, insert_operator, set_constant, set_node_inputs
from sketches import (
    IMAGE,
    Sketch,
    build_blockwise,
    build_branches,
    build_convolution,
    build_perceptron,
    make_filled_tensor,
    make_node,
)


def rename_to_tensorrt_operators(model, **names):
    """Replace quantizers and dequantizers by TensorRT's own ones, which have the type in their names."""
    for one in model.graph.node:
        if one.op_type in names:
            one.op_type, one.domain = names[one.op_type], "trt"
            del one.input[2:]
    model.opset_import.append(helper.make_opsetid("trt", 1))
    return model


def build_tensorrt_float8(model):
    return rename_to_tensorrt_operators(
        model, QuantizeLinear="TRT_FP8QuantizeLinear", DequantizeLinear="TRT_FP8DequantizeLinear"
    )


def build_tensorrt_int4(block=64):
    model = rename_to_tensorrt_operators(build_blockwise(block=block), DequantizeLinear="TRT_INT4DequantizeLinear")
    del find(model, "w_DQ").attribute[1:]  # its shapes define the block size
    return model


def append_plugin(operator, domain):
    """The convolution, followed by a plugin."""
    model = build_convolution()
    model.graph.node.append(make_node(operator, "out", "boxes", domain=domain))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("boxes", Kind.FLOAT, IMAGE))
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def build_nvfp4(block=16, is_dynamic=True, is_stored=True):
    """A product with weight and input in float4, with block scales in float8 that have a scale themselves."""
    sketch = Sketch()
    x, whole = sketch.input("x", 4, 64), sketch.constant("whole", [], 0.5)
    if is_dynamic:
        dynamic = make_node("TRT_FP4DynamicQuantize", f"{x} {whole}", "x_Q s", domain="trt", axis=-1, block_size=16)
        sketch.nodes.append(dynamic)
        held = sketch.node("DequantizeLinear", "s_DQ", "s", whole)
        x = sketch.node("DequantizeLinear", "x_DQ", "x_Q", held, axis=-1, block_size=16, domain="trt")
    scales = sketch.constant("w_scales", [64 // block, 64], 2.0, Kind.FLOAT8E4M3FN)
    scales = sketch.node("DequantizeLinear", "scales_DQ", scales, whole) if is_stored else scales
    w = sketch.constant("w", [64, 64], 1.0, Kind.FLOAT4E2M1)
    w = sketch.node("DequantizeLinear", "w_DQ", w, scales, axis=0, block_size=block)
    return sketch.model(sketch.node("MatMul", "out", x, w), 24, [4, 64])


def build_mxfp8(block=32, quantized_kind=Kind.FLOAT8E4M3FN, scale=Kind.FLOAT8E8M0):
    """A product with a float8 weight and exponent-only block scales."""
    sketch = Sketch()
    scales = sketch.constant("w_scales", [64 // block, 64] if block else [], 2.0, scale)
    w = sketch.constant("w", [64, 64], 1.0, quantized_kind)
    blocks = {"axis": 0, "block_size": block} if block else {}
    w = sketch.node("DequantizeLinear", "w_DQ", w, scales, output_dtype=Kind.FLOAT, **blocks)
    return sketch.model(sketch.node("MatMul", "out", sketch.dequantize_dynamically("x", 4, 64), w), 25, [4, 64])


def build_tensorrt_mxfp8(block=32):
    """The same with TensorRT's own operators: exponents as bytes, and a dynamically quantized input.

    Only the quantizer of the input states the block size.
    """
    sketch = Sketch()
    x = sketch.dequantize_dynamically("x", 4, 64)
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


def build_block_quantized(block=64, other=None, kind=Kind.INT4):
    """A float weight with a block-wise pair."""
    sketch = Sketch()
    scales = (
        sketch.constant("scales", [128 // block, 128], 0.05),
        sketch.constant("zeros", [128 // block, 128], 0, kind),
    )
    w = sketch.constant("w", [128, 128], 0.25)
    w = sketch.node("QuantizeLinear", "w_Q", w, *scales, axis=0, block_size=block)
    w = sketch.node("DequantizeLinear", "w_DQ", w, *scales, axis=0, block_size=other or block)
    return sketch.model(sketch.node("MatMul", "out", sketch.input("x", 4, 128), w), 21)


def add_stale_types(model, **stale):
    """Add the shapes that a file had before it was changed."""
    model.graph.value_info.extend(helper.make_tensor_value_info(n, Kind.FLOAT, shape) for n, shape in stale.items())
    return model


def build_stale_branch():
    model = build_branches(
        make_node("Transpose", "x", "turned", perm=[1, 0]), make_node("Transpose", "turned", "end", perm=[1, 0])
    )
    for attribute in find(model, "out").attribute:
        attribute.g.value_info.append(helper.make_tensor_value_info("turned", Kind.INT64, [7]))
    return model


def build_attention_opset23(missing=""):
    """The Attention of opset 23 with quantized query, key and value, except for at most one of them."""
    sketch = Sketch()
    inputs = [sketch.input(name, 1, 4, 8, 16) for name in "qkv"]
    inputs = [x if x == missing else sketch.quantize(x) for x in inputs]
    return sketch.model(sketch.node("Attention", "out", *inputs), 23)


def build_einsum(equation="bik,kj->bij", axis=1, quantized=True):
    """An Einsum of an input and a weight."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", 2, 4, 32))
    w = sketch.weight("w", 32, 32, channels=32, axis=axis) if quantized else sketch.constant("w", [32, 32], 0.5)
    return sketch.model(sketch.node("Einsum", "out", x, w, equation=equation))


def build_permuted_input(operator, *others, **attributes):
    """The Q/DQ pair of an input, the operators that move it, and the product that reads it."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", 4, 32))
    others = [sketch.constant(f"at{number}", *other, Kind.INT64) for number, other in enumerate(others)]
    x = sketch.node(operator, "moved", x, *others, **attributes)
    return sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 32, 32)))


def build_cast_after_pairs(*tensors):
    """The perceptron in float16 with float32 scales: a Cast follows each pair."""
    model = build_perceptron(Kind.FLOAT16, opset=19)
    for tensor, consumer in (("w_DQ", "gemm"), ("v_DQ", "matmul")):
        scale = f"{tensor[0]}_scale"
        set_constant(model, scale, 0.05, shape=[32])
        model.graph.initializer.append(helper.make_tensor(f"{tensor[0]}_whole", Kind.FLOAT, [32, 32], [0.25] * 1024))
        set_node_inputs(model, f"{tensor[0]}_Q", f"{tensor[0]}_whole {scale} {tensor[0]}_zero")
        insert_operator(model, tensor, consumer, "Cast")
        cast = next(one for one in model.graph.node if "moved" in one.output)
        cast.attribute.append(helper.make_attribute("to", Kind.FLOAT16))
        cast.name = cast.output[0] = f"{tensor[0]}_cast"
        reader = find(model, consumer)
        reader.input[:] = [f"{tensor[0]}_cast" if name == "moved" else name for name in reader.input]
    drop(model, "w", "v")
    return model


def build_scaled_sizes(data=""):
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


def build_two_types(first=Kind.INT8, second=Kind.FLOAT8E4M3FN):
    """Two layers, each with an integer type of its own."""
    sketch = Sketch(target=first)
    tensor = sketch.node("MatMul", "one", sketch.quantize(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32))
    sketch.target = second
    tensor = sketch.quantize(sketch.node("Relu", "relu", tensor))
    return sketch.model(sketch.node("MatMul", "out", tensor, sketch.weight("v", 32, 32)), 21)


def build_int4_and_float8():
    """A layer with a weight-only INT4 weight, and one in float8."""
    sketch = Sketch(target=Kind.FLOAT8E4M3FN)
    w = sketch.add_stored_weight("w", [128, 128], [2, 128], Kind.INT4, axis=0, block_size=64)
    tensor = sketch.node("Relu", "relu", sketch.node("MatMul", "one", sketch.input("x", 4, 128), w))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(tensor), sketch.weight("v", 128, 32)), 21)


def build_loop(axis=0, zero=0):
    """A loop with a quantized convolution in its body."""
    held = {"x_scale": 0.05, "x_zero": zero, "w": 0.2, "w_scale": 0.05, "w_zero": 0}
    shapes = {"w": [16, 16, 1, 1], "w_scale": [16], "w_zero": [16]}
    constants = [
        make_filled_tensor(n, Kind.INT8 if "zero" in n else Kind.FLOAT, shapes.get(n, []), v) for n, v in held.items()
    ]
    nodes = [
        make_node("Identity", "on", "more"),
        make_node("QuantizeLinear", "state x_scale x_zero", "x_Q"),
        make_node("DequantizeLinear", "x_Q x_scale x_zero", "x_DQ"),
        make_node("QuantizeLinear", "w w_scale w_zero", "w_Q", axis=axis),
        make_node("DequantizeLinear", "w_Q w_scale w_zero", "w_DQ", axis=axis),
        make_node("Conv", "x_DQ w_DQ", "end"),
    ]
    flag, image = (partial(helper.make_tensor_value_info, elem_type=k, shape=s) for k, s in ((9, []), (1, IMAGE)))
    begin = [helper.make_tensor_value_info("turn", Kind.INT64, []), flag("on"), image("state")]
    body = helper.make_graph(nodes, "body", begin, [flag("more"), image("end")], constants)
    sketch = Sketch()
    turns, go = sketch.constant("turns", [], 2, Kind.INT64), sketch.constant("go", [], 1, Kind.BOOL)
    return sketch.model(sketch.node("Loop", "out", turns, go, sketch.input("x", *IMAGE), body=body), shape=IMAGE)


def build_gemm_weight_first(axis, **turned):
    """A Gemm with the weight as the first operand."""
    sketch = Sketch()
    w, x = sketch.weight("w", 32, 32, channels=32, axis=axis), sketch.quantize(sketch.input("x", 32, 4))
    return sketch.model(sketch.node("Gemm", "out", w, x, **turned))


def build_int32_weight():
    """A layer with an INT32 weight, as biases have."""
    sketch = Sketch()
    w = sketch.constant("w", [32, 32], 5, Kind.INT32)
    w = sketch.node("DequantizeLinear", "w_DQ", w, sketch.constant("w_scale", [], 0.5))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(sketch.input("x", 4, 32)), w))


def build_permuted_int8_output():
    """Integers are returned, once they are turned."""
    model = add_output(build_convolution(), "turned", Kind.INT8)
    model.graph.node.append(make_node("Transpose", "relu_Q", "turned", perm=[0, 2, 3, 1]))
    return model


def build_second_pair(scale=0.05):
    """A second pair after the first."""
    sketch = Sketch()
    x = sketch.quantize(sketch.quantize(sketch.input("x", 4, 32)))
    model = sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 32, 32)))
    return set_constant(model, "x_DQ_scale", scale)


def build_resize():
    """A Resize between Q/DQ pairs of one scale; a layer and a Concat read its result."""
    sketch = Sketch()
    x, scales = sketch.quantize(sketch.input("x", *IMAGE)), sketch.constant("scales", [4], [1, 1, 2, 2])
    sketch.nodes.append(helper.make_node("Resize", [x, "", scales], ["up"], "up", mode="nearest"))
    other = sketch.quantize(sketch.input("skip", 4, 16, 16, 16))
    whole = sketch.quantize(sketch.node("Concat", "joined", sketch.quantize("up"), other, axis=1))
    return sketch.model(sketch.node("Conv", "out", whole, sketch.weight("w", 16, 32, 1, 1)))


def build_attention_heads():
    """Attention written by hand: projections, split into heads, and merged again."""
    sketch = Sketch()
    x, sides = sketch.quantize(sketch.input("x", 2, 8, 32)), sketch.constant("sides", [4], [2, 8, 4, 8], Kind.INT64)
    parts = []
    for name in "qkv":
        part = sketch.node("MatMul", name, x, sketch.weight(f"w{name}", 32, 32, channels=32, axis=1))
        part = sketch.node("Reshape", f"{name}_parts", part, sides)
        order = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        parts.append(sketch.quantize(sketch.node("Transpose", f"{name}_heads", part, perm=order)))
    logits = sketch.node("Mul", "scaled", sketch.node("MatMul", "logits", *parts[:2]), sketch.constant("s", [], 0.3))
    mixed = sketch.node("MatMul", "mixed", sketch.quantize(sketch.node("Softmax", "chances", logits)), parts[2])
    mixed = sketch.node("Transpose", "turned", mixed, perm=[0, 2, 1, 3])
    mixed = sketch.node("Reshape", "whole", mixed, sketch.constant("flat", [3], [2, 8, 32], Kind.INT64))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(mixed), sketch.weight("wo", 32, 32)))


def build_dynamic_float8():
    """A float8 input with its type in an attribute, read by a dequantizer in TensorRT's domain."""
    sketch = Sketch(target=Kind.FLOAT8E4M3FN)
    types = {"output_type": Kind.FLOAT8E4M3FN, "scale_type": Kind.FLOAT}
    sketch.nodes.append(make_node("TRT_DynamicQuantize", sketch.input("x", 4, 64), "x_Q s", domain="trt", **types))
    x = sketch.node("DequantizeLinear", "x_DQ", "x_Q", "s", axis=-1, block_size=32, domain="trt")
    return sketch.model(sketch.node("MatMul", "out", x, sketch.weight("w", 64, 64)), 21, [4, 64])


def build_plugin_output(kind):
    """The output of a plugin is quantized; only the file states its type."""
    sketch = Sketch()
    y = sketch.quantize(sketch.node("Region_TRT", "y", sketch.input("x", 4, 32), domain="trt"))
    model = sketch.model(sketch.node("MatMul", "out", y, sketch.weight("w", 32, 32)), shape=[4, 32])
    model.graph.value_info.append(helper.make_tensor_value_info("y", kind, [4, 32]))
    return model


def build_other_dynamic_scale():
    """Dynamically quantized INT8 with static scales."""
    model = build_nvfp4()
    model.graph.node.insert(0, make_node("ReduceMax", "x", "largest", keepdims=0))
    return set_node_inputs(model, "x_DQ", "x_Q largest")


def build_bfloat16_middle():
    """Values in bfloat16 between float32 ones, before ONNX's operators supported bfloat16."""
    sketch = Sketch()
    x = sketch.node("Cast", "narrow", sketch.input("x", 4, 32), to=Kind.BFLOAT16)
    return sketch.model(sketch.node("Cast", "out", sketch.node("HardSwish", "swish", x), to=Kind.FLOAT), 18, [4, 32])


def build_float64_random():
    sketch = Sketch()
    x = sketch.node("RandomUniform", "noise", dtype=Kind.DOUBLE, shape=[4, 32])
    return sketch.model(sketch.node("Cast", "out", x, to=Kind.FLOAT))


def build_quantized_branch():
    """A branch that quantizes a tensor which is also quantized outside."""
    sketch = Sketch()
    product = sketch.node("MatMul", "product", sketch.quantize(sketch.input("x", 4, 32)), sketch.weight("w", 32, 32))
    pair = (
        make_node("QuantizeLinear", "x x_scale x_zero", "again_Q"),
        make_node("DequantizeLinear", "again_Q x_scale", "again_DQ"),
    )
    nodes = {
        "then_branch": [*pair, make_node("MatMul", "again_DQ w_DQ", "end")],
        "else_branch": [make_node("Abs", product, "end")],
    }
    ends = [helper.make_tensor_value_info("end", Kind.FLOAT, None)]
    graphs = {name: helper.make_graph(own, name, [], ends) for name, own in nodes.items()}
    return sketch.model(sketch.node("If", "out", sketch.input("flag", kind=Kind.BOOL), **graphs))


def insert_cast(model, tensor, consumer, to):
    model = insert_operator(model, tensor, consumer, "Cast")
    next(one for one in model.graph.node if "moved" in one.output).attribute.append(helper.make_attribute("to", to))
    return model
