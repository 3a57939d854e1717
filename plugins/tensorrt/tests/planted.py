"""Graphs with one fault each, the rules that they violate, and the nodes that the rules may name."""

from functools import partial

import numpy as np
from onnx import TensorProto as Kind
from planting import (
    add_output,
    build_topk_opset9,
    build_with_unsupported_operator,
    bypass_qdq_pair,
    insert_operator,
    insert_qdq_pair,
    make_input,
    prepend_nodes,
    set_axis,
    set_constant,
    set_node_inputs,
)
from sketches import (
    IMAGE,
    build_attention,
    build_blockwise,
    build_branches,
    build_concatenation,
    build_convolution,
    build_deconvolution,
    build_float_node,
    build_multiplication,
    build_perceptron,
    build_pooled_convolution,
    build_pooling,
    build_residual,
    build_sum_of_two,
    build_topk,
    build_transposed_weight,
    build_weight_first,
    build_without_zero_points,
    make_filled_tensor,
    make_node,
)

X, W, V, RELU, EXTRA = (f"{tensor}_Q {tensor}_DQ" for tensor in ("x", "w", "v", "relu", "extra"))
ALL = f"{X} {W} {V} {RELU}"
FLOATS = "Softmax", "LayerNormalization", "Sigmoid"
LINEAR = "x_Q x_scale x_zero w_Q w_scale w_zero x_scale x_zero"
EXTENT = make_node("Shape", "x", "extents"), make_node("Cast", "extents", "lengths", to=Kind.FLOAT)
LARGEST, BIAS = (
    partial(make_node, "ReduceMax", outputs="x_scale", keepdims=0),
    make_node("DequantizeLinear", "b s", "bias"),
)
DYNAMIC = (
    make_node("DynamicQuantizeLinear", "x", "bytes scale zero"),
    make_node("DequantizeLinear", "bytes scale zero", "end"),
)
SCALE = make_node("Constant", "", "s", value=make_filled_tensor("", Kind.FLOAT, [], 0.05))
BYTE = make_node("Constant", "", "z", value=make_filled_tensor("", Kind.INT8, [], 0))
PAIR = make_node("QuantizeLinear", "x s z", "q"), make_node("DequantizeLinear", "q s z", "d")
MANY = make_node("Constant", "", "k", value=make_filled_tensor("", Kind.INT64, [1], 3841))
FAULTS = {  # how each is planted, the rules that it breaks, and the nodes that may be blamed, FILE for the whole file
    "uint8 activation": (lambda: set_constant(build_convolution(), "x_zero", 0, Kind.UINT8), "integer-type", X),
    "uint8 by a missing zero point": (
        lambda: set_node_inputs(build_convolution(), "x_Q", "x x_scale"),
        "integer-type valid-onnx",
        f"{X} FILE",
    ),
    "uint8 by attribute": (lambda: build_without_zero_points(Kind.UINT8), "integer-type", ALL),
    "int16 activation": (lambda: set_constant(build_perceptron(opset=21), "x_zero", 0, Kind.INT16), "integer-type", X),
    "e5m2": (lambda: build_perceptron(target=Kind.FLOAT8E5M2, opset=19), "integer-type", ALL),
    "integer data": (lambda: make_input(build_convolution(), "x", Kind.INT32, IMAGE), "data-type", f"{X} FILE"),
    "zero point of one": (lambda: set_constant(build_convolution(), "x_zero", 1, Kind.INT8), "zero-point", X),
    "zero point of one channel": (
        lambda: set_constant(build_convolution(), "w_zero", [0] * 15 + [1], Kind.INT8, [16]),
        "zero-point",
        W,
    ),
    "zero point at run time": (lambda: make_input(build_convolution(), "x_zero", Kind.INT8), "zero-point", X),
    "scale at run time": (lambda: make_input(build_convolution(), "x_scale", Kind.FLOAT), "scale", X),
    "scale of the input": (lambda: prepend_nodes(build_convolution(), LARGEST(inputs="x")), "scale", f"{X} x_scale"),
    "scale of a shape": (
        lambda: prepend_nodes(build_convolution(), *EXTENT, LARGEST(inputs="lengths")),
        "scale",
        f"{X} x_scale",
    ),
    **{
        f"scale of {s}": (lambda s=s: set_constant(build_convolution(), "x_scale", s), "scale", X)
        for s in (0, -1, np.nan)
    },
    "channel's scale of zero": (
        lambda: set_constant(build_convolution(), "w_scale", [0.05] * 15 + [0], shape=[16]),
        "scale",
        W,
    ),
    "wide scale": (
        lambda: set_node_inputs(
            set_constant(build_perceptron(Kind.FLOAT16, opset=19), "wide", 0.05), "x_Q", "x wide x_zero"
        ),
        "scale-type valid-onnx",
        f"{X} FILE",
    ),
    "activation per channel": (lambda: build_convolution(channels=16), "activation-per-tensor", X),
    "key per channel": (lambda: build_attention(32), "activation-per-tensor", "k_Q k_DQ logits"),
    "Conv of axis 1": (lambda: build_convolution(axis=1), "weight-axis", f"{W} conv"),
    "Conv of default axis": (lambda: build_convolution(axis=None), "weight-axis", f"{W} conv"),
    "Conv of stored weight and axis 1": (lambda: set_axis(build_convolution(), "v_DQ", 1), "weight-axis", "v_DQ out"),
    "axis of Q alone": (lambda: set_axis(build_convolution(), "w_Q", 1), "pair", f"{W} conv"),
    "Gemm of axis 1": (lambda: build_perceptron(gemm_axis=1), "weight-axis", f"{W} gemm"),
    "Gemm of axis 0": (lambda: build_perceptron(transposed=0), "weight-axis", f"{W} gemm"),
    "MatMul of axis 0": (lambda: build_perceptron(matmul_axis=0), "weight-axis", f"{V} matmul"),
    "Transpose and MatMul of axis 1": (lambda: build_transposed_weight(1), "weight-axis", f"{W} turned out"),
    "ConvTranspose of axis 0": (lambda: build_deconvolution(channels=16, axis=0), "weight-axis", f"{W} out"),
    "grouped ConvTranspose": (lambda: build_deconvolution(2, 8, 1), "transposed-groups", f"{W} out"),
    "int32 bias": (
        lambda: prepend_nodes(set_constant(set_constant(build_convolution(), "b", 9, Kind.INT32, [16]), "s", 1), BIAS),
        "float-bias",
        "bias conv",
    ),
    "int8 bias": (lambda: insert_qdq_pair(build_convolution(), "bias", "conv"), "float-bias", f"{EXTRA} conv"),
    "int8 offset": (lambda: insert_qdq_pair(build_perceptron(), "offset", "out"), "float-bias", f"{EXTRA} out"),
    "int4 in Conv": (lambda: build_convolution(21, stored=Kind.INT4), "all-inputs blocks", "v_DQ out"),
    "int4 activation": (
        lambda: set_constant(build_perceptron(opset=21), "x_zero", 0, Kind.INT4),
        "all-inputs blocks",
        f"{X} gemm",
    ),
    "int4 by int8": (
        lambda: insert_qdq_pair(build_blockwise(Kind.FLOAT), "x", "out"),
        "all-inputs",
        f"{EXTRA} w_DQ out",
    ),
    "int4 in blocks of 32": (lambda: build_blockwise(block=32), "blocks", "w_DQ out"),
    "int4 in blocks along the stack": (lambda: build_blockwise(axis=0, shape=(64, 64, 64)), "blocks", "w_DQ out"),
    "int4 at opset 18": (lambda: build_blockwise(opset=18), "type-needs-opset valid-onnx", "w_DQ FILE"),
    "uint4 in blocks": (lambda: build_blockwise(weight=Kind.UINT4), "all-inputs blocks integer-type", "w_DQ out"),
    "int8 in blocks": (
        lambda: insert_qdq_pair(build_blockwise(Kind.FLOAT, Kind.INT8), "x", "out"),
        "blocks",
        "w_DQ out",
    ),
    "float4 in blocks of 64": (lambda: build_blockwise(weight=Kind.FLOAT4E2M1, opset=23), "blocks", "w_DQ out"),
    "float8 at opset 18": (
        lambda: build_perceptron(target=Kind.FLOAT8E4M3FN, opset=18),
        "type-needs-opset valid-onnx",
        f"{ALL} FILE",
    ),
    "axis at opset 12": (lambda: build_convolution(12), "type-needs-opset valid-onnx", f"{W} v_DQ FILE"),
    "pairs at opset 9": (lambda: build_deconvolution(opset=9), "type-needs-opset valid-onnx", f"{X} {W} FILE"),
    **{f"opset {version}": (partial(build_float_node, opset=version), "opset", "FILE") for version in (8, 26)},
    "ConvInteger": (
        partial(build_with_unsupported_operator, "ConvInteger", "x_Q w_Q"),
        "known-operators pair valid-onnx",
        "odd FILE",
    ),
    "MatMulInteger": (
        partial(build_with_unsupported_operator, "MatMulInteger", "x_Q w_Q"),
        "known-operators pair",
        "odd",
    ),
    "QLinearConv": (
        partial(build_with_unsupported_operator, "QLinearConv", LINEAR),
        "known-operators pair valid-onnx",
        "odd FILE",
    ),
    "QLinearMatMul": (partial(build_with_unsupported_operator, "QLinearMatMul", LINEAR), "known-operators pair", "odd"),
    "operator of com.microsoft": (
        lambda: build_with_unsupported_operator("FusedMatMul", "x w", "com.microsoft"),
        "known-operators",
        "odd FILE",
    ),
    "DynamicQuantizeLinear": (
        lambda: build_with_unsupported_operator("DynamicQuantizeLinear", "x", outputs="odd scale zero"),
        "known-operators",
        "odd",
    ),
    "DynamicQuantizeLinear in a branch": (
        lambda: build_branches(*DYNAMIC),
        "integer-type known-operators pair scale zero-point",
        "bytes end out",
    ),
    "uint8 in a branch": (
        lambda: build_branches(
            SCALE, make_node("QuantizeLinear", "x s", "q"), make_node("DequantizeLinear", "q s", "end")
        ),
        "integer-type isolated",
        "q end",
    ),
    "alone in a branch": (
        lambda: build_branches(SCALE, BYTE, *PAIR, make_node("Softmax", "d", "end")),
        "isolated",
        "q d end",
    ),
    "TopK in a branch": (
        lambda: build_branches(MANY, make_node("TopK", "x k", "end indices")),
        "top-k valid-onnx",
        "end FILE",
    ),
    "Add with float": (lambda: bypass_qdq_pair(build_sum_of_two(), "x", "total"), "all-operands", "y_Q y_DQ total"),
    "Add of float result": (lambda: build_sum_of_two(result=False), "all-operands", "x_Q x_DQ y_Q y_DQ total"),
    "weight as the first operand of axis 1": (lambda: build_weight_first(1), "weight-axis", f"{W} out"),
    "pair before MaxPool and Relu": (
        lambda: insert_qdq_pair(build_pooled_convolution(), "conv", "pool"),
        "before-fusion",
        f"{EXTRA} conv pool relu",
    ),
    "computed scalar": (
        lambda: prepend_nodes(build_multiplication(1), make_node("ReduceSum", "x", "factor", keepdims=0)),
        "scalar",
        "factor_Q factor_DQ",
    ),
    "TopK of 3841 by attribute": (lambda: build_topk_opset9(3841), "top-k valid-onnx", "out FILE"),
    "pool of float result after Reshape": (
        lambda: insert_operator(
            bypass_qdq_pair(bypass_qdq_pair(build_pooling(), "pool", "out"), "w", "out"), "pool", "out", "Identity"
        ),
        "all-operands",
        f"{X} pool",
    ),
    "Conv of axis 1 after an Identity": (
        lambda: insert_operator(build_convolution(axis=1), "w_DQ", "conv", "Identity"),
        "weight-axis",
        f"{W} conv",
    ),
    "int8 bias after an Identity": (
        lambda: insert_operator(insert_qdq_pair(build_convolution(), "bias", "conv"), "extra_DQ", "conv", "Identity"),
        "float-bias",
        f"{EXTRA} conv",
    ),
    "Concat of float result": (
        lambda: bypass_qdq_pair(bypass_qdq_pair(build_concatenation(), "joined", "out"), "w", "out"),
        "all-operands",
        "a_Q a_DQ b_Q b_DQ joined",
    ),
    "quantized twice, once after an Identity": (
        lambda: insert_qdq_pair(insert_operator(build_residual(), "relu", "relu_Q", "Identity"), "relu", "add"),
        "isolated one-quantizer",
        f"{EXTRA} {RELU} add",
    ),
    "both, one after a Dropout": (
        lambda: insert_operator(insert_qdq_pair(build_residual(), "branch", "add"), "branch", "extra_Q", "Dropout"),
        "all-operands residual",
        f"{EXTRA} add branch {RELU}",
    ),
    "branches of two ranks": (
        lambda: build_branches(make_node("ReduceSum", "x", "end", keepdims=0)),
        "branches",
        "out",
    ),
    "pair before BatchNormalization": (
        lambda: insert_qdq_pair(build_convolution(), "conv", "norm"),
        "before-fusion",
        f"{EXTRA} conv norm",
    ),
    "pair after BatchNormalization": (
        lambda: insert_qdq_pair(build_convolution(), "norm", "relu"),
        "before-fusion",
        f"{EXTRA} norm relu",
    ),
    "pair between Conv and Relu": (
        lambda: insert_qdq_pair(build_residual(), "conv", "relu"),
        "before-fusion",
        f"{EXTRA} conv relu",
    ),
    "pair between Gemm and Relu": (
        lambda: insert_qdq_pair(build_perceptron(), "gemm", "relu"),
        "before-fusion",
        f"{EXTRA} gemm relu",
    ),
    "pair between MatMul and offset": (
        lambda: insert_qdq_pair(build_perceptron(), "matmul", "out"),
        "all-operands before-fusion",
        f"{EXTRA} matmul out",
    ),
    "pair between Add and Relu": (
        lambda: insert_qdq_pair(build_residual(), "add", "out"),
        "isolated",
        f"{EXTRA} add out",
    ),
    "pair that nothing reads": (lambda: insert_qdq_pair(build_convolution(), "out"), "isolated", f"{EXTRA} out"),
    "both branches": (
        lambda: insert_qdq_pair(build_residual(), "branch", "add"),
        "all-operands residual",
        f"{EXTRA} add branch {RELU}",
    ),
    "both, one normalized": (
        lambda: insert_qdq_pair(build_residual(norm=True), "norm", "add"),
        "all-operands residual",
        f"{EXTRA} add norm {RELU}",
    ),
    "wrong branch": (
        lambda: set_node_inputs(insert_qdq_pair(build_residual(), "branch", "add"), "add", "extra_DQ relu"),
        "all-operands residual",
        f"{EXTRA} add",
    ),
    "quantized twice": (
        lambda: insert_qdq_pair(set_node_inputs(build_residual(), "add", "branch relu"), "relu", "add"),
        "one-quantizer",
        f"{EXTRA} {RELU}",
    ),
    "two scales": (
        lambda: insert_qdq_pair(set_node_inputs(build_residual(), "add", "branch relu"), "relu", "add", 1),
        "one-quantizer",
        f"{EXTRA} {RELU}",
    ),
    "Concat of two scales": (
        lambda: set_constant(build_concatenation(), "b_scale", 0.1),
        "concat-scales",
        "a_Q a_DQ b_Q b_DQ joined",
    ),
    "Concat with float": (
        lambda: bypass_qdq_pair(build_concatenation(), "b", "joined"),
        "all-operands",
        "a_Q a_DQ joined joined_Q joined_DQ",
    ),
    "Mul with float": (
        lambda: bypass_qdq_pair(build_multiplication(1), "factor", "product"),
        "all-operands",
        f"{X} product product_Q product_DQ",
    ),
    "Conv of float weight": (lambda: bypass_qdq_pair(build_convolution(), "w", "conv"), "all-inputs", f"{X} conv"),
    "Conv of float activation": (lambda: bypass_qdq_pair(build_convolution(), "x", "conv"), "all-inputs", f"{W} conv"),
    "Gemm of float weight": (lambda: bypass_qdq_pair(build_perceptron(), "w", "gemm"), "all-inputs", f"{X} gemm"),
    "MatMul of float key": (
        lambda: bypass_qdq_pair(build_attention(), "k", "logits"),
        "all-inputs",
        "norm_Q norm_DQ logits",
    ),
    "pool of float result": (
        lambda: bypass_qdq_pair(bypass_qdq_pair(build_pooling(), "pool", "out"), "w", "out"),
        "all-operands",
        f"{X} pool",
    ),
    "logits": (lambda: insert_qdq_pair(build_attention(), "logits", "softmax"), "isolated", f"{EXTRA} logits softmax"),
    **{
        f"alone before {name}": (
            lambda name=name: insert_qdq_pair(build_float_node(name), "x", "out"),
            "isolated",
            f"{EXTRA} out",
        )
        for name in FLOATS
    },
    "TopK of 3841": (lambda: build_topk(3841), "top-k", "out"),
    "unknown rank": (lambda: make_input(build_convolution(), "x", Kind.FLOAT, None), "static-rank", "x_Q FILE"),
    "scalar": (build_multiplication, "scalar", "factor_Q factor_DQ"),
    "INT8 returned": (lambda: add_output(build_convolution(), "relu_Q", Kind.INT8), "pair", "relu_Q FILE"),
}
