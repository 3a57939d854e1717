"""TensorRT's rules for explicitly quantized files: clean graphs pass, and one fault planted in them is found."""

from functools import partial

import numpy as np
import onnx
import pytest
from clika_ref_tensorrt.rules import violations
from onnx import TensorProto as Kind
from onnx import helper


def filled(name, kind, shape, values):
    return helper.make_tensor(name, kind, shape, np.broadcast_to(values, shape).flatten().tolist())


def node(operator, inputs, outputs, **attributes):
    """A node that bears the name of its first output."""
    outputs = outputs.split()
    return helper.make_node(operator, inputs.split(), outputs, outputs[0], **attributes)


IMAGE, BYTES = (4, 16, 8, 8), node("Cast", "bytes", "x", to=Kind.FLOAT)


class Sketch:
    def __init__(self, kind=Kind.FLOAT, target=Kind.INT8):
        self.kind, self.target = kind, target
        self.nodes, self.inputs, self.initializers = [], [], []

    def input(self, name, *shape, kind=None):
        self.inputs.append(helper.make_tensor_value_info(name, kind or self.kind, shape))
        return name

    def constant(self, name, shape, value, kind=None):
        self.initializers.append(filled(name, kind or self.kind, shape, value))
        return name

    def node(self, operator, name, *inputs, **attributes):
        self.nodes.append(node(operator, " ".join(inputs), name, **attributes))
        return name

    def quantized(self, tensor, channels=None, axis=None):
        shape, axes = [] if channels is None else [channels], {} if axis is None else {"axis": axis}
        scale = self.constant(f"{tensor}_scale", shape, 0.05)
        zero = self.constant(f"{tensor}_zero", shape, 0, self.target)
        self.node("QuantizeLinear", f"{tensor}_Q", tensor, scale, zero, **axes)
        return self.node("DequantizeLinear", f"{tensor}_DQ", f"{tensor}_Q", scale, zero, **axes)

    def weight(self, name, *shape, channels=None, axis=None):
        return self.quantized(self.constant(name, shape, 0.25), channels, axis)

    def stored_weight(self, name, shape, scale_shape, kind=Kind.INT8, **axes):
        scale = self.constant(f"{name}_scale", scale_shape, 0.05)
        zero = self.constant(f"{name}_zero", scale_shape, 0, kind)
        return self.node("DequantizeLinear", f"{name}_DQ", self.constant(name, shape, 3, kind), scale, zero, **axes)

    def normalized(self, tensor):
        statistics = [self.constant(name, [16], 0.5) for name in ("gain", "shift", "mean", "variance")]
        return self.node("BatchNormalization", "norm", tensor, *statistics)

    def model(self, output, opset=17):
        output = helper.make_tensor_value_info(output, self.kind, None)
        graph = helper.make_graph(self.nodes, "graph", self.inputs, [output], self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        graph.output[0].CopyFrom(onnx.shape_inference.infer_shapes(model).graph.output[0])
        return helper.make_model(graph, opset_imports=model.opset_import)


def convolution(opset=17, channels=None, axis=0, group=1, stored=Kind.INT8):
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", *IMAGE), channels)
    w = sketch.weight("w", 16, 16 // group, 3, 3, channels=16, axis=axis)
    sketch.node("Conv", "conv", x, w, sketch.constant("bias", [16], 0.5), group=group)
    relu = sketch.node("Relu", "relu", sketch.normalized("conv"))
    v = sketch.stored_weight("v", [16, 16, 1, 1], [16], stored, axis=0)
    return sketch.model(sketch.node("Conv", "out", sketch.quantized(relu), v), opset)


def residual(norm=False):
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", *IMAGE))
    w, v = (sketch.weight(name, 16, 16, 1, 1, channels=16, axis=0) for name in "wv")
    identity = sketch.quantized(sketch.node("Relu", "relu", sketch.node("Conv", "conv", x, w)))
    branch = sketch.node("Conv", "branch", identity, v)
    branch = sketch.normalized(branch) if norm else branch
    return sketch.model(sketch.node("Relu", "out", sketch.node("Add", "add", branch, identity)))


def perceptron(kind=Kind.FLOAT, target=Kind.INT8, opset=17, batch=4, transposed=1, gemm_axis=0, matmul_axis=1):
    sketch = Sketch(kind, target)
    x = sketch.quantized(sketch.input("x", batch, 32))
    w = sketch.weight("w", 32, 32, channels=32, axis=gemm_axis)
    gemm = sketch.node("Gemm", "gemm", x, w, sketch.constant("bias", [32], 0.5), transB=transposed)
    relu = sketch.quantized(sketch.node("Relu", "relu", gemm))
    product = sketch.node("MatMul", "matmul", relu, sketch.weight("v", 32, 32, channels=32, axis=matmul_axis))
    return sketch.model(sketch.node("Add", "out", product, sketch.constant("offset", [32], 0.5)), opset)


def transposed_weight(axis=0):
    sketch = Sketch()
    w = sketch.node("Transpose", "turned", sketch.weight("w", 32, 32, channels=32, axis=axis), perm=[1, 0])
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(sketch.input("x", 4, 32)), w))


def deconvolution(group=1, channels=None, axis=None, opset=17):
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", *IMAGE))
    w = sketch.weight("w", 16, 16 // group, 2, 2, channels=channels, axis=axis)
    return sketch.model(sketch.node("ConvTranspose", "out", x, w, group=group, strides=[2, 2]), opset)


def concatenation():
    sketch = Sketch()
    a, b = (sketch.quantized(sketch.input(name, *IMAGE)) for name in "ab")
    joined = sketch.quantized(sketch.node("Concat", "joined", a, b, axis=1))
    return sketch.model(sketch.node("Conv", "out", joined, sketch.weight("w", 16, 32, 3, 3)))


def pooling(operator="AveragePool"):
    sketch = Sketch()
    pooled = sketch.node(operator, "pool", sketch.quantized(sketch.input("x", *IMAGE)), kernel_shape=[2, 2])
    pooled = pooled if operator == "MaxPool" else sketch.quantized(pooled)
    return sketch.model(sketch.node("Conv", "out", pooled, sketch.weight("w", 16, 16, 3, 3)))


def multiplication(*factor_shape):
    sketch = Sketch()
    x, factor = sketch.quantized(sketch.input("x", 4, 32)), sketch.quantized(sketch.input("factor", *factor_shape))
    product = sketch.quantized(sketch.node("Mul", "product", x, factor))
    return sketch.model(sketch.node("MatMul", "out", product, sketch.weight("w", 32, 32)))


def attention(channels=None):
    sketch = Sketch()
    q, k, v = (sketch.input(name, 4, 32, 32) for name in "qkv")
    q = sketch.quantized(sketch.node("LayerNormalization", "norm", q, sketch.constant("gain", [32], 0.5)))
    softmax = sketch.node("Softmax", "softmax", sketch.node("MatMul", "logits", q, sketch.quantized(k, channels)))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(softmax), sketch.quantized(v)))


def sum_of_two(result=True):
    """A sum of two quantized values, which is quantized itself or not."""
    sketch = Sketch()
    one, other = (sketch.quantized(sketch.input(name, 4, 32)) for name in "xy")
    total = sketch.node("Add", "total", one, other)
    total = total if result else sketch.node("Softmax", "soft", total)
    return sketch.model(sketch.node("MatMul", "out", sketch.quantized(total), sketch.weight("w", 32, 32)))


def weight_first(axis=0):
    sketch = Sketch()
    w, x = sketch.weight("w", 32, 32, channels=32, axis=axis), sketch.quantized(sketch.input("x", 32, 4))
    return sketch.model(sketch.node("MatMul", "out", w, x))


def pooled_convolution():
    """A convolution, what pools it, and its activation behind that."""
    sketch = Sketch()
    x, w = sketch.quantized(sketch.input("x", *IMAGE)), sketch.weight("w", 16, 16, 3, 3)
    pooled = sketch.node("MaxPool", "pool", sketch.node("Conv", "conv", x, w), kernel_shape=[2, 2])
    relu = sketch.quantized(sketch.node("Relu", "relu", pooled))
    return sketch.model(sketch.node("Conv", "out", relu, sketch.weight("v", 16, 16, 1, 1)))


def gated():
    """Squeeze and excite: one pair serves the layer that squeezes and the product with its gate."""
    sketch = Sketch()
    x = sketch.quantized(sketch.input("x", *IMAGE))
    gate = sketch.node("Sigmoid", "gate", sketch.node("Conv", "squeezed", x, sketch.weight("w", 16, 16, 1, 1)))
    product = sketch.quantized(sketch.node("Mul", "product", x, gate))
    return sketch.model(sketch.node("Conv", "out", product, sketch.weight("v", 16, 16, 1, 1)))


def branched_off():
    """A convolution whose result a layer reads, and which is added to what follows from that."""
    sketch = Sketch()
    w, v = (sketch.weight(name, 16, 16, 1, 1, channels=16, axis=0) for name in "wv")
    start = sketch.quantized(sketch.node("Conv", "conv", sketch.quantized(sketch.input("x", *IMAGE)), w))
    branch = sketch.node("Sigmoid", "sigmoid", sketch.node("Conv", "branch", start, v))
    return sketch.model(sketch.node("Add", "out", branch, start))


def lone(operator="Softmax", opset=17):
    """One node that stays in float."""
    sketch = Sketch()
    gain = [sketch.constant("gain", [32], 0.5)] if operator == "LayerNormalization" else []
    return sketch.model(sketch.node(operator, "out", sketch.input("x", 4, 32), *gain), opset)


def blockwise(kind=Kind.FLOAT16, weight=Kind.INT4, opset=21, block=64, axis=-2, shape=(128, 128)):
    sketch, scale_shape = Sketch(kind), list(shape)
    scale_shape[axis] //= block
    w = sketch.stored_weight("w", shape, scale_shape, weight, axis=axis, block_size=block)
    return sketch.model(sketch.node("MatMul", "out", sketch.input("x", *shape[:-2], 4, shape[-2]), w), opset)


def without_zero_points(kind):
    """The perceptron at opset 21, whose quantizers name their target type by ``output_dtype`` alone."""
    model = perceptron(opset=21)
    for one in (one for one in model.graph.node if "quantize" in one.op_type.lower()):
        del one.input[2:]
        one.attribute.extend([helper.make_attribute("output_dtype", kind)] if one.op_type == "QuantizeLinear" else [])
    return model


def constant_nodes():
    """The convolution, whose scale is a Constant and whose zero point is a Constant behind a Cast."""
    scale, zero = filled("", Kind.FLOAT, [], 0.05), filled("", Kind.INT32, [], 0)
    first = node("Constant", "", "x_scale", value=scale), node("Constant", "", "wide", value=zero)
    return computed(computed(convolution(), node("Cast", "wide", "x_zero", to=Kind.INT8)), *first)


def selection(k=3840):
    sketch = Sketch()
    inputs = sketch.input("x", 4, 4096), sketch.constant("k", [1], k, Kind.INT64)
    sketch.nodes.append(node("TopK", " ".join(inputs), "out indices"))
    return sketch.model("out")


def branches(*otherwise):
    """An If between the absolute value of its input and what the last of the given nodes computes, ``end``."""
    sketch, graphs = Sketch(), {}
    sketch.input("x", 4, 32)
    for branch, nodes in ("then_branch", [node("Abs", "x", "end")]), ("else_branch", otherwise):
        graphs[branch] = helper.make_graph(nodes, branch, [], [helper.make_tensor_value_info("end", Kind.FLOAT, None)])
    return sketch.model(sketch.node("If", "out", sketch.input("flag", kind=Kind.BOOL), **graphs))


CLEAN = {
    "convolution": convolution,
    "convolution of negative axis at opset 25": partial(convolution, 25, axis=-4),
    "depthwise convolution": partial(convolution, group=16),
    "bytes as input": lambda: computed(fed(convolution(), "bytes", Kind.UINT8, IMAGE), BYTES),
    "constants as nodes": constant_nodes,
    "residual": residual,
    "residual of normalized branch": partial(residual, norm=True),
    "perceptron": perceptron,
    "perceptron of symbolic batch": partial(perceptron, batch="batch"),
    "perceptron of default axis": partial(perceptron, matmul_axis=None),
    "perceptron of weight as it multiplies": partial(perceptron, transposed=0, gemm_axis=1),
    "perceptron in float16": partial(perceptron, Kind.FLOAT16, opset=19),
    "perceptron in bfloat16": partial(perceptron, Kind.BFLOAT16, opset=23),
    "perceptron in float8": partial(perceptron, target=Kind.FLOAT8E4M3FN, opset=19),
    "target type by attribute": partial(without_zero_points, Kind.INT8),
    "weight behind a Transpose": transposed_weight,
    "deconvolution": deconvolution,
    "deconvolution per channel": partial(deconvolution, channels=16, axis=1),
    "grouped deconvolution": partial(deconvolution, group=2),
    "concatenation": concatenation,
    "average pooling": pooling,
    "max pooling": partial(pooling, "MaxPool"),
    "multiplication": partial(multiplication, 1),
    "attention": attention,
    "sum of two": sum_of_two,
    "weight as the first operand": weight_first,
    "convolution pooled before its activation": pooled_convolution,
    "gate that shares a pair": gated,
    "convolution that begins a residual": branched_off,
    "softmax at opset 9": partial(lone, opset=9),
    "layer norm": partial(lone, "LayerNormalization"),
    "blockwise": blockwise,
    "blockwise of 128 in float32": partial(blockwise, Kind.FLOAT, block=128),
    "blockwise along the last dimension": partial(blockwise, axis=-1),
    "blockwise stack": partial(blockwise, shape=(64, 64, 64)),
    "selection": selection,
    "branches": partial(branches, node("Neg", "x", "end")),
}


def find(model, name):
    return next(one for one in model.graph.node if one.name == name)


def drop(model, *names):
    for items in (model.graph.initializer, model.graph.input, model.graph.node):
        kept = [item for item in items if item.name not in names]
        del items[:]
        items.extend(kept)


def given(model, name, values, kind=Kind.FLOAT, shape=()):
    """A constant gets another value, type or shape."""
    drop(model, name)
    model.graph.initializer.append(filled(name, kind, shape, values))
    return model


def fed(model, name, kind, shape=()):
    """A constant becomes an input, or an input changes its type or shape."""
    drop(model, name)
    model.graph.input.insert(0, helper.make_tensor_value_info(name, kind, shape))
    return model


def computed(model, *nodes):
    """Nodes that come first compute what was a constant or an input."""
    drop(model, *(one.name for one in nodes))
    for place, one in enumerate(nodes):
        model.graph.node.insert(place, one)
    return model


def along(model, name, axis):
    find(model, name).attribute[0].i = axis
    return model


def reading(model, name, inputs):
    find(model, name).input[:] = inputs.split()
    return model


def paired(model, tensor, consumer="", scale=0.05):
    """A further pair, ``extra_Q`` and ``extra_DQ``, stands between a tensor and a consumer, or the graph's output."""
    model = given(given(model, "extra_scale", scale), "extra_zero", 0, Kind.INT8)
    place = len(model.graph.node)
    if consumer:
        reader = find(model, consumer)
        place = list(model.graph.node).index(reader)
        reader.input[:] = ["extra_DQ" if name == tensor else name for name in reader.input]
    else:
        model.graph.output[0].name = "extra_DQ"
    model.graph.node.insert(place, node("DequantizeLinear", "extra_Q extra_scale extra_zero", "extra_DQ"))
    model.graph.node.insert(place, node("QuantizeLinear", f"{tensor} extra_scale extra_zero", "extra_Q"))
    return model


def bypassed(model, tensor, consumer):
    """The pair behind a tensor is gone, and its consumer reads the float."""
    reader = find(model, consumer)
    reader.input[:] = [tensor if name == f"{tensor}_DQ" else name for name in reader.input]
    drop(model, f"{tensor}_Q", f"{tensor}_DQ")
    return model


def foreign(operator, inputs, domain="", outputs="odd"):
    """The perceptron with one more result, computed by an operator that TensorRT does not import."""
    model = also_returning(perceptron(), "end", Kind.FLOAT)
    model.graph.node.append(node(operator, inputs, outputs, domain=domain))
    model.graph.node.append(node("Cast", "odd", "end", to=Kind.FLOAT))
    model.opset_import.extend([helper.make_opsetid(domain, 1)] if domain else [])
    return model


def also_returning(model, name, kind):
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return model


X, W, V, RELU, EXTRA = (f"{tensor}_Q {tensor}_DQ" for tensor in ("x", "w", "v", "relu", "extra"))
ALL = f"{X} {W} {V} {RELU}"
FLOATS = "Softmax", "LayerNormalization", "Sigmoid"
LINEAR = "x_Q x_scale x_zero w_Q w_scale w_zero x_scale x_zero"
EXTENT = node("Shape", "x", "extents"), node("Cast", "extents", "lengths", to=Kind.FLOAT)
LARGEST, BIAS = partial(node, "ReduceMax", outputs="x_scale", keepdims=0), node("DequantizeLinear", "b s", "bias")
DYNAMIC = node("DynamicQuantizeLinear", "x", "bytes scale zero"), node("DequantizeLinear", "bytes scale zero", "end")
SCALE = node("Constant", "", "s", value=filled("", Kind.FLOAT, [], 0.05))
BYTE = node("Constant", "", "z", value=filled("", Kind.INT8, [], 0))
PAIR = node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d")
MANY = node("Constant", "", "k", value=filled("", Kind.INT64, [1], 3841))
FAULTS = {  # how each is planted, and the nodes that may be blamed for it, where FILE is the whole file
    "uint8 activation": (lambda: given(convolution(), "x_zero", 0, Kind.UINT8), X),
    "uint8 by a missing zero point": (lambda: reading(convolution(), "x_Q", "x x_scale"), X),
    "uint8 by attribute": (lambda: without_zero_points(Kind.UINT8), ALL),
    "int16 activation": (lambda: given(perceptron(opset=21), "x_zero", 0, Kind.INT16), X),
    "e5m2": (lambda: perceptron(target=Kind.FLOAT8E5M2, opset=19), ALL),
    "integer data": (lambda: fed(convolution(), "x", Kind.INT32, IMAGE), f"{X} FILE"),
    "zero point of one": (lambda: given(convolution(), "x_zero", 1, Kind.INT8), X),
    "zero point of one channel": (lambda: given(convolution(), "w_zero", [0] * 15 + [1], Kind.INT8, [16]), W),
    "zero point at run time": (lambda: fed(convolution(), "x_zero", Kind.INT8), X),
    "scale at run time": (lambda: fed(convolution(), "x_scale", Kind.FLOAT), X),
    "scale of the input": (lambda: computed(convolution(), LARGEST(inputs="x")), f"{X} x_scale"),
    "scale of a shape": (lambda: computed(convolution(), *EXTENT, LARGEST(inputs="lengths")), f"{X} x_scale"),
    **{f"scale of {s}": (lambda s=s: given(convolution(), "x_scale", s), X) for s in (0, -1, np.nan)},
    "channel's scale of zero": (lambda: given(convolution(), "w_scale", [0.05] * 15 + [0], shape=[16]), W),
    "wide scale": (lambda: reading(given(perceptron(Kind.FLOAT16, opset=19), "wide", 0.05), "x_Q", "x wide x_zero"), X),
    "activation per channel": (lambda: convolution(channels=16), X),
    "key per channel": (lambda: attention(32), "k_Q k_DQ logits"),
    "Conv of axis 1": (lambda: convolution(axis=1), f"{W} conv"),
    "Conv of default axis": (lambda: convolution(axis=None), f"{W} conv"),
    "Conv of stored weight and axis 1": (lambda: along(convolution(), "v_DQ", 1), "v_DQ out"),
    "axis of Q alone": (lambda: along(convolution(), "w_Q", 1), f"{W} conv"),
    "Gemm of axis 1": (lambda: perceptron(gemm_axis=1), f"{W} gemm"),
    "Gemm of axis 0": (lambda: perceptron(transposed=0), f"{W} gemm"),
    "MatMul of axis 0": (lambda: perceptron(matmul_axis=0), f"{V} matmul"),
    "Transpose and MatMul of axis 1": (lambda: transposed_weight(1), f"{W} turned out"),
    "ConvTranspose of axis 0": (lambda: deconvolution(channels=16, axis=0), f"{W} out"),
    "grouped ConvTranspose": (lambda: deconvolution(2, 8, 1), f"{W} out"),
    "int32 bias": (lambda: computed(given(given(convolution(), "b", 9, Kind.INT32, [16]), "s", 1), BIAS), "bias conv"),
    "int8 bias": (lambda: paired(convolution(), "bias", "conv"), f"{EXTRA} conv"),
    "int8 offset": (lambda: paired(perceptron(), "offset", "out"), f"{EXTRA} out"),
    "int4 in Conv": (lambda: convolution(21, stored=Kind.INT4), "v_DQ out"),
    "int4 activation": (lambda: given(perceptron(opset=21), "x_zero", 0, Kind.INT4), f"{X} gemm"),
    "int4 by int8": (lambda: paired(blockwise(Kind.FLOAT), "x", "out"), f"{EXTRA} w_DQ out"),
    "int4 in blocks of 32": (lambda: blockwise(block=32), "w_DQ out"),
    "int4 in blocks along the stack": (lambda: blockwise(axis=0, shape=(64, 64, 64)), "w_DQ out"),
    "int4 at opset 18": (lambda: blockwise(opset=18), "w_DQ FILE"),
    "uint4 in blocks": (lambda: blockwise(weight=Kind.UINT4), "w_DQ out"),
    "int8 in blocks": (lambda: paired(blockwise(Kind.FLOAT, Kind.INT8), "x", "out"), "w_DQ out"),
    "float4 in blocks of 64": (lambda: blockwise(weight=Kind.FLOAT4E2M1, opset=23), "w_DQ out"),
    "float8 at opset 18": (lambda: perceptron(target=Kind.FLOAT8E4M3FN, opset=18), f"{ALL} FILE"),
    "axis at opset 12": (lambda: convolution(12), f"{W} v_DQ FILE"),
    "pairs at opset 9": (lambda: deconvolution(opset=9), f"{X} {W} FILE"),
    **{f"opset {version}": (partial(lone, opset=version), "FILE") for version in (8, 26)},
    **{name: (partial(foreign, name, "x_Q w_Q"), "odd") for name in ("ConvInteger", "MatMulInteger")},
    **{name: (partial(foreign, name, LINEAR), "odd") for name in ("QLinearConv", "QLinearMatMul")},
    "operator of com.microsoft": (lambda: foreign("FusedMatMul", "x w", "com.microsoft"), "odd FILE"),
    "DynamicQuantizeLinear": (lambda: foreign("DynamicQuantizeLinear", "x", outputs="odd scale zero"), "odd"),
    "DynamicQuantizeLinear in a branch": (lambda: branches(*DYNAMIC), "bytes end out"),
    "uint8 in a branch": (
        lambda: branches(SCALE, node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s", "end")),
        "q end",
    ),
    "alone in a branch": (lambda: branches(SCALE, BYTE, *PAIR, node("Softmax", "d", "end")), "q d end"),
    "TopK in a branch": (lambda: branches(MANY, node("TopK", "x k", "end places")), "end"),
    "Add with float": (lambda: bypassed(sum_of_two(), "x", "total"), "y_Q y_DQ total"),
    "Add of float result": (lambda: sum_of_two(result=False), "x_Q x_DQ y_Q y_DQ total"),
    "weight as the first operand of axis 1": (lambda: weight_first(1), f"{W} out"),
    "pair before MaxPool and Relu": (lambda: paired(pooled_convolution(), "conv", "pool"), f"{EXTRA} conv pool relu"),
    "computed scalar": (
        lambda: computed(multiplication(1), node("ReduceSum", "x", "factor", keepdims=0)),
        "factor_Q factor_DQ",
    ),
    "branches of two ranks": (lambda: branches(node("ReduceSum", "x", "end", keepdims=0)), "out"),
    "pair before BatchNormalization": (lambda: paired(convolution(), "conv", "norm"), f"{EXTRA} conv norm"),
    "pair behind BatchNormalization": (lambda: paired(convolution(), "norm", "relu"), f"{EXTRA} norm relu"),
    "pair between Conv and Relu": (lambda: paired(residual(), "conv", "relu"), f"{EXTRA} conv relu"),
    "pair between Gemm and Relu": (lambda: paired(perceptron(), "gemm", "relu"), f"{EXTRA} gemm relu"),
    "pair between MatMul and offset": (lambda: paired(perceptron(), "matmul", "out"), f"{EXTRA} matmul out"),
    "pair between Add and Relu": (lambda: paired(residual(), "add", "out"), f"{EXTRA} add out"),
    "pair that nothing reads": (lambda: paired(convolution(), "out"), f"{EXTRA} out"),
    "both branches": (lambda: paired(residual(), "branch", "add"), f"{EXTRA} add branch {RELU}"),
    "both, one normalized": (lambda: paired(residual(norm=True), "norm", "add"), f"{EXTRA} add norm {RELU}"),
    "wrong branch": (lambda: reading(paired(residual(), "branch", "add"), "add", "extra_DQ relu"), f"{EXTRA} add"),
    "quantized twice": (lambda: paired(reading(residual(), "add", "branch relu"), "relu", "add"), f"{EXTRA} {RELU}"),
    "two scales": (lambda: paired(reading(residual(), "add", "branch relu"), "relu", "add", 1), f"{EXTRA} {RELU}"),
    "Concat of two scales": (lambda: given(concatenation(), "b_scale", 0.1), "a_Q a_DQ b_Q b_DQ joined"),
    "Concat with float": (lambda: bypassed(concatenation(), "b", "joined"), "a_Q a_DQ joined joined_Q joined_DQ"),
    "Mul with float": (lambda: bypassed(multiplication(1), "factor", "product"), f"{X} product product_Q product_DQ"),
    "Conv of float weight": (lambda: bypassed(convolution(), "w", "conv"), f"{X} conv"),
    "Conv of float activation": (lambda: bypassed(convolution(), "x", "conv"), f"{W} conv"),
    "Gemm of float weight": (lambda: bypassed(perceptron(), "w", "gemm"), f"{X} gemm"),
    "MatMul of float key": (lambda: bypassed(attention(), "k", "logits"), "norm_Q norm_DQ logits"),
    "pool of float result": (lambda: bypassed(bypassed(pooling(), "pool", "out"), "w", "out"), f"{X} pool"),
    "logits": (lambda: paired(attention(), "logits", "softmax"), f"{EXTRA} logits softmax"),
    **{f"alone before {name}": (lambda name=name: paired(lone(name), "x", "out"), f"{EXTRA} out") for name in FLOATS},
    "TopK of 3841": (lambda: selection(3841), "out"),
    "unknown rank": (lambda: fed(convolution(), "x", Kind.FLOAT, None), "x_Q FILE"),
    "scalar": (multiplication, "factor_Q factor_DQ"),
    "integers returned": (lambda: also_returning(convolution(), "relu_Q", Kind.INT8), "relu_Q FILE"),
}


@pytest.mark.parametrize("graph", CLEAN.values(), ids=CLEAN.keys())
def test_a_clean_graph_breaks_no_rule(graph):
    onnx.checker.check_model(graph(), full_check=True)
    assert violations(graph()) == []


@pytest.mark.parametrize(("planted", "names"), FAULTS.values(), ids=FAULTS.keys())
def test_each_planted_violation_is_found(planted, names):
    blamed = {violation.node for violation in violations(planted())}
    assert set() < blamed <= {name.replace("FILE", "") for name in names.split()}
