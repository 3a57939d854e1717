"""TensorRT's rules for explicitly quantized files: clean graphs pass, and one fault planted in them is found."""

from functools import partial

import numpy as np
import onnx
import pytest
from clika_ref_tensorrt.rules import violations
from onnx import TensorProto as Kind
from planting import (
    along,
    also_returning,
    between,
    bypassed,
    computed,
    constant_nodes,
    fed,
    foreign,
    given,
    oldest_selection,
    paired,
    reading,
)
from sketches import (
    BYTES,
    IMAGE,
    attention,
    blockwise,
    branched_off,
    branches,
    concatenation,
    convolution,
    deconvolution,
    filled,
    gated,
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
    "scale as a Constant of one float": lambda: computed(
        convolution(), node("Constant", "", "x_scale", value_float=0.05)
    ),
    "pair behind an Identity": lambda: between(convolution(), "x_DQ", "conv", "Identity"),
    "weight behind an Identity": lambda: between(convolution(), "w_DQ", "conv", "Identity"),
    "pair before DepthToSpace": lambda: between(convolution(group=16), "x_DQ", "conv", "Identity"),
    "joined, one of them pooled": lambda: between(concatenation(), "a_DQ", "joined", "Dropout"),
}


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
    "TopK of 3841 by attribute": (lambda: oldest_selection(3841), "out"),
    "pool of float result behind Reshape": (
        lambda: between(bypassed(bypassed(pooling(), "pool", "out"), "w", "out"), "pool", "out", "Identity"),
        f"{X} pool",
    ),
    "Conv of axis 1 behind an Identity": (
        lambda: between(convolution(axis=1), "w_DQ", "conv", "Identity"),
        f"{W} conv",
    ),
    "int8 bias behind an Identity": (
        lambda: between(paired(convolution(), "bias", "conv"), "extra_DQ", "conv", "Identity"),
        f"{EXTRA} conv",
    ),
    "Concat of float result": (
        lambda: bypassed(bypassed(concatenation(), "joined", "out"), "w", "out"),
        "a_Q a_DQ b_Q b_DQ joined",
    ),
    "quantized twice, once behind an Identity": (
        lambda: paired(between(residual(), "relu", "relu_Q", "Identity"), "relu", "add"),
        f"{EXTRA} {RELU} add",
    ),
    "both, one behind a Dropout": (
        lambda: between(paired(residual(), "branch", "add"), "branch", "extra_Q", "Dropout"),
        f"{EXTRA} add branch {RELU}",
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
