"""A builder of small ONNX graphs that follow TensorRT's rules."""

import numpy as np
import onnx
from onnx import TensorProto as Kind
from onnx import helper


def make_filled_tensor(name, kind, shape, values):
    return helper.make_tensor(name, kind, shape, np.broadcast_to(values, shape).flatten().tolist())


def make_node(operator, inputs, outputs, **attributes):
    """A node that bears the name of its first output."""
    outputs = outputs.split()
    return helper.make_node(operator, inputs.split(), outputs, outputs[0], **attributes)


IMAGE, BYTES = (4, 16, 8, 8), make_node("Cast", "bytes", "x", to=Kind.FLOAT)


class Sketch:
    def __init__(self, kind=Kind.FLOAT, target=Kind.INT8):
        self.kind, self.target = kind, target
        self.nodes, self.inputs, self.initializers = [], [], []

    def input(self, name, *shape, kind=None):
        self.inputs.append(helper.make_tensor_value_info(name, kind or self.kind, shape))
        return name

    def constant(self, name, shape, value, kind=None):
        self.initializers.append(make_filled_tensor(name, kind or self.kind, shape, value))
        return name

    def node(self, operator, name, *inputs, **attributes):
        self.nodes.append(make_node(operator, " ".join(inputs), name, **attributes))
        return name

    def quantize(self, tensor, channels=None, axis=None):
        shape, axes = [] if channels is None else [channels], {} if axis is None else {"axis": axis}
        scale = self.constant(f"{tensor}_scale", shape, 0.05)
        zero = self.constant(f"{tensor}_zero", shape, 0, self.target)
        self.node("QuantizeLinear", f"{tensor}_Q", tensor, scale, zero, **axes)
        return self.node("DequantizeLinear", f"{tensor}_DQ", f"{tensor}_Q", scale, zero, **axes)

    def weight(self, name, *shape, channels=None, axis=None):
        return self.quantize(self.constant(name, shape, 0.25), channels, axis)

    def add_stored_weight(self, name, shape, scale_shape, kind=Kind.INT8, **axes):
        scale = self.constant(f"{name}_scale", scale_shape, 0.05)
        zero = self.constant(f"{name}_zero", scale_shape, 0, kind)
        return self.node("DequantizeLinear", f"{name}_DQ", self.constant(name, shape, 3, kind), scale, zero, **axes)

    def dequantize_dynamically(self, name, *shape):
        """Dynamically quantize an input in blocks, by TensorRT's own operator, and dequantize it."""
        at = {"domain": "trt", "axis": -1, "block_size": 32}
        self.nodes.append(
            make_node("TRT_MXFP8DynamicQuantize", self.input(name, *shape), f"{name}_Q {name}_exponents", **at)
        )
        pair = f"{name}_Q", f"{name}_exponents"
        return self.node("TRT_MXFP8DequantizeLinear", f"{name}_DQ", *pair, output_dtype=Kind.FLOAT, **at)

    def normalize(self, tensor):
        statistics = [self.constant(name, [16], 0.5) for name in ("gain", "shift", "mean", "variance")]
        return self.node("BatchNormalization", "norm", tensor, *statistics)

    def model(self, output, opset=17, shape=None):
        output = helper.make_tensor_value_info(output, self.kind, shape)
        graph = helper.make_graph(self.nodes, "graph", self.inputs, [output], self.initializers)
        domains = {one.domain for one in self.nodes if one.domain}
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        model = helper.make_model(graph, opset_imports=opsets)
        graph.output[0].CopyFrom(onnx.shape_inference.infer_shapes(model).graph.output[0])
        return helper.make_model(graph, opset_imports=model.opset_import)


def build_convolution(opset=17, channels=None, axis=0, group=1, stored=Kind.INT8):
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE), channels)
    w = sketch.weight("w", 16, 16 // group, 3, 3, channels=16, axis=axis)
    sketch.node("Conv", "conv", x, w, sketch.constant("bias", [16], 0.5), group=group)
    relu = sketch.node("Relu", "relu", sketch.normalize("conv"))
    v = sketch.add_stored_weight("v", [16, 16, 1, 1], [16], stored, axis=0)
    return sketch.model(sketch.node("Conv", "out", sketch.quantize(relu), v), opset)


def build_residual(norm=False):
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE))
    w, v = (sketch.weight(name, 16, 16, 1, 1, channels=16, axis=0) for name in "wv")
    identity = sketch.quantize(sketch.node("Relu", "relu", sketch.node("Conv", "conv", x, w)))
    branch = sketch.node("Conv", "branch", identity, v)
    branch = sketch.normalize(branch) if norm else branch
    return sketch.model(sketch.node("Relu", "out", sketch.node("Add", "add", branch, identity)))


def build_perceptron(kind=Kind.FLOAT, target=Kind.INT8, opset=17, batch=4, transposed=1, gemm_axis=0, matmul_axis=1):
    sketch = Sketch(kind, target)
    x = sketch.quantize(sketch.input("x", batch, 32))
    w = sketch.weight("w", 32, 32, channels=32, axis=gemm_axis)
    gemm = sketch.node("Gemm", "gemm", x, w, sketch.constant("bias", [32], 0.5), transB=transposed)
    relu = sketch.quantize(sketch.node("Relu", "relu", gemm))
    product = sketch.node("MatMul", "matmul", relu, sketch.weight("v", 32, 32, channels=32, axis=matmul_axis))
    return sketch.model(sketch.node("Add", "out", product, sketch.constant("offset", [32], 0.5)), opset)


def build_transposed_weight(axis=0):
    sketch = Sketch()
    w = sketch.node("Transpose", "turned", sketch.weight("w", 32, 32, channels=32, axis=axis), perm=[1, 0])
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(sketch.input("x", 4, 32)), w))


def build_deconvolution(group=1, channels=None, axis=None, opset=17):
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE))
    w = sketch.weight("w", 16, 16 // group, 2, 2, channels=channels, axis=axis)
    return sketch.model(sketch.node("ConvTranspose", "out", x, w, group=group, strides=[2, 2]), opset)


def build_concatenation():
    sketch = Sketch()
    a, b = (sketch.quantize(sketch.input(name, *IMAGE)) for name in "ab")
    joined = sketch.quantize(sketch.node("Concat", "joined", a, b, axis=1))
    return sketch.model(sketch.node("Conv", "out", joined, sketch.weight("w", 16, 32, 3, 3)))


def build_pooling(operator="AveragePool"):
    sketch = Sketch()
    pooled = sketch.node(operator, "pool", sketch.quantize(sketch.input("x", *IMAGE)), kernel_shape=[2, 2])
    pooled = pooled if operator == "MaxPool" else sketch.quantize(pooled)
    return sketch.model(sketch.node("Conv", "out", pooled, sketch.weight("w", 16, 16, 3, 3)))


def build_multiplication(*factor_shape):
    sketch = Sketch()
    x, factor = sketch.quantize(sketch.input("x", 4, 32)), sketch.quantize(sketch.input("factor", *factor_shape))
    product = sketch.quantize(sketch.node("Mul", "product", x, factor))
    return sketch.model(sketch.node("MatMul", "out", product, sketch.weight("w", 32, 32)))


def build_attention(channels=None):
    sketch = Sketch()
    q, k, v = (sketch.input(name, 4, 32, 32) for name in "qkv")
    q = sketch.quantize(sketch.node("LayerNormalization", "norm", q, sketch.constant("gain", [32], 0.5)))
    softmax = sketch.node("Softmax", "softmax", sketch.node("MatMul", "logits", q, sketch.quantize(k, channels)))
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(softmax), sketch.quantize(v)))


def build_sum_of_two(result=True):
    """A sum of two quantized values, quantized or not."""
    sketch = Sketch()
    one, other = (sketch.quantize(sketch.input(name, 4, 32)) for name in "xy")
    total = sketch.node("Add", "total", one, other)
    total = total if result else sketch.node("Softmax", "soft", total)
    return sketch.model(sketch.node("MatMul", "out", sketch.quantize(total), sketch.weight("w", 32, 32)))


def build_weight_first(axis=0):
    sketch = Sketch()
    w, x = sketch.weight("w", 32, 32, channels=32, axis=axis), sketch.quantize(sketch.input("x", 32, 4))
    return sketch.model(sketch.node("MatMul", "out", w, x))


def build_pooled_convolution():
    """A convolution, a pool and then an activation."""
    sketch = Sketch()
    x, w = sketch.quantize(sketch.input("x", *IMAGE)), sketch.weight("w", 16, 16, 3, 3)
    pooled = sketch.node("MaxPool", "pool", sketch.node("Conv", "conv", x, w), kernel_shape=[2, 2])
    relu = sketch.quantize(sketch.node("Relu", "relu", pooled))
    return sketch.model(sketch.node("Conv", "out", relu, sketch.weight("v", 16, 16, 1, 1)))


def build_squeeze_excite():
    """Squeeze and excite: one pair is read by the squeeze layer and by the product with its gate."""
    sketch = Sketch()
    x = sketch.quantize(sketch.input("x", *IMAGE))
    gate = sketch.node("Sigmoid", "gate", sketch.node("Conv", "squeezed", x, sketch.weight("w", 16, 16, 1, 1)))
    product = sketch.quantize(sketch.node("Mul", "product", x, gate))
    return sketch.model(sketch.node("Conv", "out", product, sketch.weight("v", 16, 16, 1, 1)))


def build_branched_convolution():
    """A residual block: a layer reads the result of a convolution, and both results are added."""
    sketch = Sketch()
    w, v = (sketch.weight(name, 16, 16, 1, 1, channels=16, axis=0) for name in "wv")
    start = sketch.quantize(sketch.node("Conv", "conv", sketch.quantize(sketch.input("x", *IMAGE)), w))
    branch = sketch.node("Sigmoid", "sigmoid", sketch.node("Conv", "branch", start, v))
    return sketch.model(sketch.node("Add", "out", branch, start))


def build_float_node(operator="Softmax", opset=17):
    """One node in float."""
    sketch = Sketch()
    gain = [sketch.constant("gain", [32], 0.5)] if operator == "LayerNormalization" else []
    return sketch.model(sketch.node(operator, "out", sketch.input("x", 4, 32), *gain), opset)


def build_blockwise(kind=Kind.FLOAT16, weight=Kind.INT4, opset=21, block=64, axis=-2, shape=(128, 128)):
    sketch, scale_shape = Sketch(kind), list(shape)
    scale_shape[axis] //= block
    w = sketch.add_stored_weight("w", shape, scale_shape, weight, axis=axis, block_size=block)
    return sketch.model(sketch.node("MatMul", "out", sketch.input("x", *shape[:-2], 4, shape[-2]), w), opset)


def build_without_zero_points(kind):
    """The perceptron at opset 21, with quantizers that state their type by ``output_dtype`` only."""
    model = build_perceptron(opset=21)
    for one in (one for one in model.graph.node if "quantize" in one.op_type.lower()):
        del one.input[2:]
        one.attribute.extend([helper.make_attribute("output_dtype", kind)] if one.op_type == "QuantizeLinear" else [])
    return model


def build_topk(k=3840):
    sketch = Sketch()
    inputs = sketch.input("x", 4, 4096), sketch.constant("k", [1], k, Kind.INT64)
    sketch.nodes.append(make_node("TopK", " ".join(inputs), "out indices"))
    return sketch.model("out")


def build_branches(*otherwise):
    """An If with two branches: the absolute value of its input, and ``end``, the result of the last given node."""
    sketch, graphs = Sketch(), {}
    sketch.input("x", 4, 32)
    for branch, nodes in ("then_branch", [make_node("Abs", "x", "end")]), ("else_branch", otherwise):
        graphs[branch] = helper.make_graph(nodes, branch, [], [helper.make_tensor_value_info("end", Kind.FLOAT, None)])
    return sketch.model(sketch.node("If", "out", sketch.input("flag", kind=Kind.BOOL), **graphs))
