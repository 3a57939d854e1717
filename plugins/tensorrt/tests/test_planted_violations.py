"""TensorRT's rules for explicitly quantized files: clean graphs pass, and each inserted fault is found."""

import re
from functools import partial

import onnx
import pytest
from clean import CLEAN
from clika_ref_tensorrt.rule_book import FILE_RULES, GRAPH_RULES
from clika_ref_tensorrt.rules import find_violations
from further_planted import FURTHER, NEAR, build_float_convolution, build_int4_weight_first
from newer_planted import NEAR_NEWER, NEWER, UNKNOWN_TO_ONNX
from newer_sketches import build_block_quantized
from onnx import TensorProto as Kind
from planted import FAULTS
from reviewed_planted import NEAR_REVIEWED, REVIEWED
from sketches import build_blockwise, build_convolution

CORRECT = {**CLEAN, **NEAR, **NEAR_NEWER, **NEAR_REVIEWED}
PLANTED = {**FAULTS, **FURTHER, **NEWER, **REVIEWED}


@pytest.mark.parametrize("graph", CORRECT.values(), ids=CORRECT.keys())
def test_find_violations_correct_graph_returns_none(graph):
    """A correct graph breaks no rule."""
    onnx.checker.check_model(graph(), full_check=True)
    assert find_violations(graph()) == []


@pytest.mark.parametrize("graph", UNKNOWN_TO_ONNX.values(), ids=UNKNOWN_TO_ONNX.keys())
def test_find_violations_graph_rejected_by_onnx_only_passes(graph):
    """Graphs that ONNX rejects and TensorRT accepts break no rule."""
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(graph(), full_check=True)
    assert find_violations(graph()) == []


@pytest.mark.parametrize(("planted", "rules", "names"), PLANTED.values(), ids=PLANTED.keys())
def test_find_violations_planted_fault_found_by_its_rules(planted, rules, names):
    """Each planted fault is found by the rules that it breaks."""
    found = find_violations(planted())
    assert {violation.rule for violation in found} == {*rules.split()}
    assert {violation.node for violation in found} <= {name.replace("FILE", "") for name in names.split()}


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "uint8 activation": "its quantized type is UINT8, but TensorRT computes with INT8. Use a zero point of int8",
        "axis at opset 12": "needs opset 13 for its types, axis or blocks, but the file has 12",
        "float4 at opset 21": "needs opset 23 for its types, axis or blocks, but the file has 21",
        "wide scale": "its input is FLOAT16, but its scale FLOAT. Use one type",
        "integer data": "quantizes INT32, but only 32-bit and 16-bit floats are supported",
        "float64": "Conv computes in float64, which TensorRT does not support. Export the model in float32.",
        "float8 that becomes infinite": "rounds 8-bit floats beyond 448 to infinity, but TensorRT clips them. Set",
        "int4 activation": "int4 is for weights only. Use int8",
        "int8 in blocks": "has blocks, which int8 does not support. Use a scale",
        "int4 in Conv": "reads int4, which only matrix products support. Use int8, or keep it float.",
        "int4 without blocks": "int4 without blocks is not supported. TensorRT supports blocks of 64 or 128.",
        "int4 in blocks of 32": "int4 in blocks of 32 is not supported. TensorRT supports 64 or 128.",
        "int4 in blocks along the stack": "its blocks are not on one of the last two dims of the weight",
        "int32 bias": "its bias is quantized. Keep biases float.",
        "int8 offset": "adds a quantized constant to the result of MatMul. Keep biases float.",
        "zero point of one channel": "its zero point is 1. Quantize symmetrically, around 0.",
        "zero point at run time": "its zero point is computed. Use a constant of zeros.",
        "scale at run time": "its scale is computed. Use a constant that does not depend on inputs or shapes.",
        "scale of 0": "a scale is not above 0, or not finite",
        "scales of four dims": r"its scales have the shape \[16, 1, 1, 1\]. Use a scalar, or one dim with a scale for",
        "axis of no dim": "its axis 7 does not exist in a tensor with 4",
        "eight scales of sixteen channels": r"shape \[8\], but a tensor of the shape \[16, 16, 3, 3\] has .* on axis 0",
        "scales of other blocks": r"shape \[128, 2\], but a tensor of the shape \[128, 128\] has \[2, 128\] on axis 0",
        "one zero point of sixteen scales": r"its zero point has the shape \[\], but its scale \[16\]. Use one shape",
        "activation per channel": "16 scales of an activation. Use one scale for the whole tensor.",
        "Conv of axis 1": "the scales of a weight of Conv are on axis 1, but its output channels are on 0",
        "Transpose and MatMul of axis 1": "are on axis 1, which becomes 0, but its output channels are on 1",
        "grouped ConvTranspose": "has groups and a scale for each channel of its weight. Use one scale, or",
        "Conv of float weight": "its weight is not quantized, but the other is: it runs in float. Quantize all, or",
        "Conv of float activation": "its input is not quantized, but the other is",
        "int4 by int8": "its weight is int4, and its input is quantized. Such weights are for weight-only layers.",
        "float8 by int8": "its operands are FLOAT8E4M3FN and INT8. Give both the same quantized type.",
        "pair between Conv and Relu": "is between Conv and Relu, which prevents their fusion. Put it after them.",
        "pair between Conv and LeakyRelu": "is between Conv and LeakyRelu, which prevents their fusion. Put it after",
        "pairs within SiLU": "is between Conv and Sigmoid and Mul, which prevents their fusion. Put it after them.",
        "both branches": "both branches are quantized. Quantize only the one that does not come from the convolution.",
        "wrong branch": "the branch that comes from the convolution is quantized. Quantize only the other one.",
        "identity in float": "adds a float tensor to an INT8 convolution, but the tensor is quantized for other",
        "quantized twice": "quantizes 'relu', as 'relu_Q' does. Use one node for all",
        "axis of Q alone": "has scales along another axis than its DequantizeLinear or QuantizeLinear, 'w_DQ'. Use the",
        "another scale than its inverse": "has other scales than its DequantizeLinear or QuantizeLinear, 'x_DQ'. Use",
        "MatMulInteger": "reads the quantized output of 'x_Q' directly. Insert a DequantizeLinear.",
        "INT8 returned": "its quantized output is an output of the model. Return the output of a DequantizeLinear.",
        "INT8 of a Cast": "reads integers from Cast, but only those of a QuantizeLinear, a constant or an input",
        "scalar": "quantizes a scalar. Keep it float.",
        "scalar in int8": "dequantizes a scalar. Keep it float.",
        "Add of bytes": "Add computes with UINT8, which is supported only for inputs and outputs. Cast it to INT32 or",
        "bytes between floats": "Cast computes with UINT8, which is supported only for inputs and outputs",
        "Add of int16": "Add reads INT16, which TensorRT does not support. Use INT32 or INT64.",
        "Identity of strings": "Identity reads STRING, which TensorRT does not support. Represent it",
        "Add of int8": "Add computes with INT8 that does not come from a QuantizeLinear. Cast it to INT32 or to",
        "Squeeze of what may be 1": "has no axes, but dims that may be 1 at run time. State the axes to remove.",
        "rank of what is found": "as many dims as 'row' has elements, but the rank must be fixed",
        "experts of axis 1": "are on axis 1, which becomes 0, but its output channels are on 1",
        "experts with a scale each": "are on axis 0, from which Gather selects, but its output channels are on 1",
        "MatMul of float key": "its operand 1 is not quantized, but the other is: it runs in float",
        "Concat of two scales": "joins tensors of the scales 0.05, 0.1. Use one",
        "Add with a float constant": "only 1 of its 2 operands are quantized: it runs in float. Quantize all, or none.",
        "Add of float result": "its operands are quantized, but its output is not: it runs in float. Quantize all, or",
        "pair that nothing reads": "is read only by an output, in float: the pair costs time",
        "opset 8": "opset 8 is outside 9 to 25. Export with one of these.",
        "unknown rank": "the input 'x' has no rank. Dims may be dynamic, but the rank must be fixed.",
        "rank of an input's length": "as many dims as 'sizes' has elements, but the rank must be fixed",
        "QLinearConv": "QLinearConv is not supported. Use float operators between QuantizeLinear and DequantizeLinear.",
        "operator of com.microsoft": "com.microsoft.FusedMatMul is not an ONNX operator. It needs a plugin of",
        "float4 as a pair of another name": "trt.TRT_FP4QDQ is not an ONNX operator. It needs a plugin of TensorRT.",
        "Unique": "Unique is not supported. Use other operators, or a plugin of TensorRT.",
        "attention of a float key": "its key is not quantized, but others are: it runs in float. Quantize all, or",
        "Einsum of a float weight": "its operand 1 is not quantized, but the other is",
        "Einsum of scales along what is summed": "a weight of Einsum are on axis 0, but its output channels are on 1",
        "int8 and float8 in two layers": "is float8, but 'x_Q' is int8. TensorRT does not support both in one network",
        "float8 scales as they are": "its scale is FLOAT8E4M3FN. Use a float, or a dequantized scale.",
        "exponents of blocks of 16": "its scales are only exponents, as of float8 in blocks of 32. Use float scales.",
        "other blocks than its inverse": "has other blocks than its DequantizeLinear or QuantizeLinear, 'w_DQ'. Use",
        "quantized again": "quantizes the result of the dequantization 'x_DQ'. Read its input instead.",
        "input in blocks of 16": "float8e4m3fn in blocks of 16 is not supported. TensorRT supports 32.",
        "int32 weight": "its quantized type is INT32, but TensorRT computes with INT8",
        "TopK of 3841": "TopK requests 3,841 elements, but TensorRT supports at most 3,840. Request fewer.",
        "branches of two ranks": r"its branches return tensors of the ranks \[2\] and \[0\]. Return equal ranks.",
        "int4 at opset 18": "ONNX rejects it: Unrecognized attribute: block_size for operator DequantizeLinear",
    }.items(),
)
def test_violation_message_states_fault_and_fix(name, message):
    """A violation states the fault and the fix."""
    planted, *_ = PLANTED[name]
    assert any(re.search(message, violation.message) for violation in find_violations(planted()))


def test_find_violations_blocks_reported_for_both_of_pair():
    """Blocks are reported for both nodes of a pair."""
    assert [violation.node for violation in find_violations(build_block_quantized(32))] == ["w_Q", "w_DQ"]


def test_rules_each_have_planted_fault():
    """Each rule has a planted fault here or in the malformed files."""
    broken = {rule for _, rules, _ in PLANTED.values() for rule in rules.split()}
    assert broken | {"empty", "form"} == {*GRAPH_RULES, *FILE_RULES}


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (partial(build_blockwise, block=32), []),
        (partial(build_blockwise, weight=Kind.INT8), []),
        (build_int4_weight_first, []),
        (partial(build_float_convolution, Kind.FLOAT16, Kind.INT4, block_size=64), ["blocks"]),
        (partial(build_float_convolution, stored_kind=Kind.INT8), ["all-inputs"]),
        (partial(build_convolution, 21, stored=Kind.INT4), ["all-inputs", "blocks"]),
    ],
)
def test_find_violations_weight_only_allowed_for_matmul_only(model, rules):
    """Weight-only quantization is allowed for matrix products and nothing else."""
    assert sorted({violation.rule for violation in find_violations(model(), has_weight_only=True)}) == rules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "int4 activation",
            "[all-inputs] gemm: its input is int4, but its weight is not. Give both the same quantized type.",
        ),
        ("int4 in Conv", "[all-inputs] out: its weight is int4, which only matrix products support. Use int8, or"),
        ("int4 by int8", "[all-inputs] out: its weight is int4, and its input is quantized. Such weights are for"),
    ],
)
def test_violation_message_names_operand(name, message):
    """The message names the operand: input or weight."""
    planted, *_ = PLANTED[name]
    assert any(str(violation).startswith(message) for violation in find_violations(planted()))
