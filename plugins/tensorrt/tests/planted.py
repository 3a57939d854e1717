"""Graphs with one fault each, the rules that they violate, and the nodes that the rules may name."""

from functools import partial

import numpy as np
from onnx import TensorProto as Kind
from planting import (
    along,
    also_returning,
    between,
    bypassed,
    computed,
    fed,
    foreign,
    given,
    oldest_selection,
    paired,
    reading,
)
from sketches import (
    IMAGE,
    attention,
    blockwise,
    branches,
    concatenation,
    convolution,
    deconvolution,
    filled,
    lone,
    multiplication,
    node,
    perceptron,
    pooled_convolution,
    pooling,
    residual,
    selection,
    sum_of_two,
    transposed_weight,
    weight_first,
    without_zero_points,
)

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
FAULTS = {  # how each is planted, the rules that it breaks, and the nodes that may be blamed, FILE for the whole file
    "uint8 activation": (lambda: given(convolution(), "x_zero", 0, Kind.UINT8), "integer-type", X),
    "uint8 by a missing zero point": (
        lambda: reading(convolution(), "x_Q", "x x_scale"),
        "integer-type valid-onnx",
        f"{X} FILE",
    ),
    "uint8 by attribute": (lambda: without_zero_points(Kind.UINT8), "integer-type", ALL),
    "int16 activation": (lambda: given(perceptron(opset=21), "x_zero", 0, Kind.INT16), "integer-type", X),
    "e5m2": (lambda: perceptron(target=Kind.FLOAT8E5M2, opset=19), "integer-type", ALL),
    "integer data": (lambda: fed(convolution(), "x", Kind.INT32, IMAGE), "data-type", f"{X} FILE"),
    "zero point of one": (lambda: given(convolution(), "x_zero", 1, Kind.INT8), "zero-point", X),
    "zero point of one channel": (
        lambda: given(convolution(), "w_zero", [0] * 15 + [1], Kind.INT8, [16]),
        "zero-point",
        W,
    ),
    "zero point at run time": (lambda: fed(convolution(), "x_zero", Kind.INT8), "zero-point", X),
    "scale at run time": (lambda: fed(convolution(), "x_scale", Kind.FLOAT), "scale", X),
    "scale of the input": (lambda: computed(convolution(), LARGEST(inputs="x")), "scale", f"{X} x_scale"),
    "scale of a shape": (lambda: computed(convolution(), *EXTENT, LARGEST(inputs="lengths")), "scale", f"{X} x_scale"),
    **{f"scale of {s}": (lambda s=s: given(convolution(), "x_scale", s), "scale", X) for s in (0, -1, np.nan)},
    "channel's scale of zero": (lambda: given(convolution(), "w_scale", [0.05] * 15 + [0], shape=[16]), "scale", W),
    "wide scale": (
        lambda: reading(given(perceptron(Kind.FLOAT16, opset=19), "wide", 0.05), "x_Q", "x wide x_zero"),
        "scale-type valid-onnx",
        f"{X} FILE",
    ),
    "activation per channel": (lambda: convolution(channels=16), "activation-per-tensor", X),
    "key per channel": (lambda: attention(32), "activation-per-tensor", "k_Q k_DQ logits"),
    "Conv of axis 1": (lambda: convolution(axis=1), "weight-axis", f"{W} conv"),
    "Conv of default axis": (lambda: convolution(axis=None), "weight-axis", f"{W} conv"),
    "Conv of stored weight and axis 1": (lambda: along(convolution(), "v_DQ", 1), "weight-axis", "v_DQ out"),
    "axis of Q alone": (lambda: along(convolution(), "w_Q", 1), "pair", f"{W} conv"),
    "Gemm of axis 1": (lambda: perceptron(gemm_axis=1), "weight-axis", f"{W} gemm"),
    "Gemm of axis 0": (lambda: perceptron(transposed=0), "weight-axis", f"{W} gemm"),
    "MatMul of axis 0": (lambda: perceptron(matmul_axis=0), "weight-axis", f"{V} matmul"),
    "Transpose and MatMul of axis 1": (lambda: transposed_weight(1), "weight-axis", f"{W} turned out"),
    "ConvTranspose of axis 0": (lambda: deconvolution(channels=16, axis=0), "weight-axis", f"{W} out"),
    "grouped ConvTranspose": (lambda: deconvolution(2, 8, 1), "transposed-groups", f"{W} out"),
    "int32 bias": (
        lambda: computed(given(given(convolution(), "b", 9, Kind.INT32, [16]), "s", 1), BIAS),
        "float-bias",
        "bias conv",
    ),
    "int8 bias": (lambda: paired(convolution(), "bias", "conv"), "float-bias", f"{EXTRA} conv"),
    "int8 offset": (lambda: paired(perceptron(), "offset", "out"), "float-bias", f"{EXTRA} out"),
    "int4 in Conv": (lambda: convolution(21, stored=Kind.INT4), "all-inputs blocks", "v_DQ out"),
    "int4 activation": (lambda: given(perceptron(opset=21), "x_zero", 0, Kind.INT4), "all-inputs blocks", f"{X} gemm"),
    "int4 by int8": (lambda: paired(blockwise(Kind.FLOAT), "x", "out"), "all-inputs", f"{EXTRA} w_DQ out"),
    "int4 in blocks of 32": (lambda: blockwise(block=32), "blocks", "w_DQ out"),
    "int4 in blocks along the stack": (lambda: blockwise(axis=0, shape=(64, 64, 64)), "blocks", "w_DQ out"),
    "int4 at opset 18": (lambda: blockwise(opset=18), "type-needs-opset valid-onnx", "w_DQ FILE"),
    "uint4 in blocks": (lambda: blockwise(weight=Kind.UINT4), "all-inputs blocks integer-type", "w_DQ out"),
    "int8 in blocks": (lambda: paired(blockwise(Kind.FLOAT, Kind.INT8), "x", "out"), "blocks", "w_DQ out"),
    "float4 in blocks of 64": (lambda: blockwise(weight=Kind.FLOAT4E2M1, opset=23), "blocks", "w_DQ out"),
    "float8 at opset 18": (
        lambda: perceptron(target=Kind.FLOAT8E4M3FN, opset=18),
        "type-needs-opset valid-onnx",
        f"{ALL} FILE",
    ),
    "axis at opset 12": (lambda: convolution(12), "type-needs-opset valid-onnx", f"{W} v_DQ FILE"),
    "pairs at opset 9": (lambda: deconvolution(opset=9), "type-needs-opset valid-onnx", f"{X} {W} FILE"),
    **{f"opset {version}": (partial(lone, opset=version), "opset", "FILE") for version in (8, 26)},
    "ConvInteger": (partial(foreign, "ConvInteger", "x_Q w_Q"), "known-operators pair valid-onnx", "odd FILE"),
    "MatMulInteger": (partial(foreign, "MatMulInteger", "x_Q w_Q"), "known-operators pair", "odd"),
    "QLinearConv": (partial(foreign, "QLinearConv", LINEAR), "known-operators pair valid-onnx", "odd FILE"),
    "QLinearMatMul": (partial(foreign, "QLinearMatMul", LINEAR), "known-operators pair", "odd"),
    "operator of com.microsoft": (
        lambda: foreign("FusedMatMul", "x w", "com.microsoft"),
        "known-operators",
        "odd FILE",
    ),
    "DynamicQuantizeLinear": (
        lambda: foreign("DynamicQuantizeLinear", "x", outputs="odd scale zero"),
        "known-operators",
        "odd",
    ),
    "DynamicQuantizeLinear in a branch": (
        lambda: branches(*DYNAMIC),
        "integer-type known-operators pair scale zero-point",
        "bytes end out",
    ),
    "uint8 in a branch": (
        lambda: branches(SCALE, node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s", "end")),
        "integer-type isolated",
        "q end",
    ),
    "alone in a branch": (lambda: branches(SCALE, BYTE, *PAIR, node("Softmax", "d", "end")), "isolated", "q d end"),
    "TopK in a branch": (lambda: branches(MANY, node("TopK", "x k", "end places")), "top-k valid-onnx", "end FILE"),
    "Add with float": (lambda: bypassed(sum_of_two(), "x", "total"), "all-operands", "y_Q y_DQ total"),
    "Add of float result": (lambda: sum_of_two(result=False), "all-operands", "x_Q x_DQ y_Q y_DQ total"),
    "weight as the first operand of axis 1": (lambda: weight_first(1), "weight-axis", f"{W} out"),
    "pair before MaxPool and Relu": (
        lambda: paired(pooled_convolution(), "conv", "pool"),
        "before-fusion",
        f"{EXTRA} conv pool relu",
    ),
    "computed scalar": (
        lambda: computed(multiplication(1), node("ReduceSum", "x", "factor", keepdims=0)),
        "scalar",
        "factor_Q factor_DQ",
    ),
    "TopK of 3841 by attribute": (lambda: oldest_selection(3841), "top-k valid-onnx", "out FILE"),
    "pool of float result behind Reshape": (
        lambda: between(bypassed(bypassed(pooling(), "pool", "out"), "w", "out"), "pool", "out", "Identity"),
        "all-operands",
        f"{X} pool",
    ),
    "Conv of axis 1 behind an Identity": (
        lambda: between(convolution(axis=1), "w_DQ", "conv", "Identity"),
        "weight-axis",
        f"{W} conv",
    ),
    "int8 bias behind an Identity": (
        lambda: between(paired(convolution(), "bias", "conv"), "extra_DQ", "conv", "Identity"),
        "float-bias",
        f"{EXTRA} conv",
    ),
    "Concat of float result": (
        lambda: bypassed(bypassed(concatenation(), "joined", "out"), "w", "out"),
        "all-operands",
        "a_Q a_DQ b_Q b_DQ joined",
    ),
    "quantized twice, once behind an Identity": (
        lambda: paired(between(residual(), "relu", "relu_Q", "Identity"), "relu", "add"),
        "isolated one-quantizer",
        f"{EXTRA} {RELU} add",
    ),
    "both, one behind a Dropout": (
        lambda: between(paired(residual(), "branch", "add"), "branch", "extra_Q", "Dropout"),
        "all-operands residual",
        f"{EXTRA} add branch {RELU}",
    ),
    "branches of two ranks": (lambda: branches(node("ReduceSum", "x", "end", keepdims=0)), "branches", "out"),
    "pair before BatchNormalization": (
        lambda: paired(convolution(), "conv", "norm"),
        "before-fusion",
        f"{EXTRA} conv norm",
    ),
    "pair behind BatchNormalization": (
        lambda: paired(convolution(), "norm", "relu"),
        "before-fusion",
        f"{EXTRA} norm relu",
    ),
    "pair between Conv and Relu": (lambda: paired(residual(), "conv", "relu"), "before-fusion", f"{EXTRA} conv relu"),
    "pair between Gemm and Relu": (lambda: paired(perceptron(), "gemm", "relu"), "before-fusion", f"{EXTRA} gemm relu"),
    "pair between MatMul and offset": (
        lambda: paired(perceptron(), "matmul", "out"),
        "all-operands before-fusion",
        f"{EXTRA} matmul out",
    ),
    "pair between Add and Relu": (lambda: paired(residual(), "add", "out"), "isolated", f"{EXTRA} add out"),
    "pair that nothing reads": (lambda: paired(convolution(), "out"), "isolated", f"{EXTRA} out"),
    "both branches": (
        lambda: paired(residual(), "branch", "add"),
        "all-operands residual",
        f"{EXTRA} add branch {RELU}",
    ),
    "both, one normalized": (
        lambda: paired(residual(norm=True), "norm", "add"),
        "all-operands residual",
        f"{EXTRA} add norm {RELU}",
    ),
    "wrong branch": (
        lambda: reading(paired(residual(), "branch", "add"), "add", "extra_DQ relu"),
        "all-operands residual",
        f"{EXTRA} add",
    ),
    "quantized twice": (
        lambda: paired(reading(residual(), "add", "branch relu"), "relu", "add"),
        "one-quantizer",
        f"{EXTRA} {RELU}",
    ),
    "two scales": (
        lambda: paired(reading(residual(), "add", "branch relu"), "relu", "add", 1),
        "one-quantizer",
        f"{EXTRA} {RELU}",
    ),
    "Concat of two scales": (
        lambda: given(concatenation(), "b_scale", 0.1),
        "concat-scales",
        "a_Q a_DQ b_Q b_DQ joined",
    ),
    "Concat with float": (
        lambda: bypassed(concatenation(), "b", "joined"),
        "all-operands",
        "a_Q a_DQ joined joined_Q joined_DQ",
    ),
    "Mul with float": (
        lambda: bypassed(multiplication(1), "factor", "product"),
        "all-operands",
        f"{X} product product_Q product_DQ",
    ),
    "Conv of float weight": (lambda: bypassed(convolution(), "w", "conv"), "all-inputs", f"{X} conv"),
    "Conv of float activation": (lambda: bypassed(convolution(), "x", "conv"), "all-inputs", f"{W} conv"),
    "Gemm of float weight": (lambda: bypassed(perceptron(), "w", "gemm"), "all-inputs", f"{X} gemm"),
    "MatMul of float key": (lambda: bypassed(attention(), "k", "logits"), "all-inputs", "norm_Q norm_DQ logits"),
    "pool of float result": (
        lambda: bypassed(bypassed(pooling(), "pool", "out"), "w", "out"),
        "all-operands",
        f"{X} pool",
    ),
    "logits": (lambda: paired(attention(), "logits", "softmax"), "isolated", f"{EXTRA} logits softmax"),
    **{
        f"alone before {name}": (lambda name=name: paired(lone(name), "x", "out"), "isolated", f"{EXTRA} out")
        for name in FLOATS
    },
    "TopK of 3841": (lambda: selection(3841), "top-k", "out"),
    "unknown rank": (lambda: fed(convolution(), "x", Kind.FLOAT, None), "static-rank", "x_Q FILE"),
    "scalar": (multiplication, "scalar", "factor_Q factor_DQ"),
    "integers returned": (lambda: also_returning(convolution(), "relu_Q", Kind.INT8), "pair", "relu_Q FILE"),
}
