"""TensorRT's rules for explicitly quantized files: clean graphs pass, and one fault planted in them is found."""

import re
from functools import partial

import onnx
import pytest
from clean import CLEAN
from clika_ref_tensorrt.rule_book import FILE_RULES, GRAPH_RULES
from clika_ref_tensorrt.rules import find_violations
from further_planted import FURTHER, NEAR, few_bits_first, float_convolution
from newer_planted import NEAR_NEWER, NEWER, UNKNOWN_TO_ONNX
from newer_sketches import quantized_in_blocks
from onnx import TensorProto as Kind
from planted import FAULTS
from reviewed_planted import NEAR_REVIEWED, REVIEWED
from sketches import blockwise, convolution

CORRECT = {**CLEAN, **NEAR, **NEAR_NEWER, **NEAR_REVIEWED}
PLANTED = {**FAULTS, **FURTHER, **NEWER, **REVIEWED}


@pytest.mark.parametrize("graph", CORRECT.values(), ids=CORRECT.keys())
def test_a_clean_graph_breaks_no_rule(graph):
    onnx.checker.check_model(graph(), full_check=True)
    assert find_violations(graph()) == []


@pytest.mark.parametrize("graph", UNKNOWN_TO_ONNX.values(), ids=UNKNOWN_TO_ONNX.keys())
def test_what_onnx_refuses_and_tensorrt_takes_breaks_no_rule(graph):
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(graph(), full_check=True)
    assert find_violations(graph()) == []


@pytest.mark.parametrize(("planted", "rules", "names"), PLANTED.values(), ids=PLANTED.keys())
def test_each_planted_violation_is_found_by_the_rules_that_it_breaks(planted, rules, names):
    found = find_violations(planted())
    assert {violation.rule for violation in found} == {*rules.split()}
    assert {violation.node for violation in found} <= {name.replace("FILE", "") for name in names.split()}


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "uint8 activation": "its integers are UINT8; TensorRT computes with INT8: give a zero point of int8 zeros",
        "axis at opset 12": "needs opset 13 by its types, axis or blocks, and the file has 12",
        "float4 at opset 21": "needs opset 23 by its types, axis or blocks, and the file has 21",
        "wide scale": "its input is FLOAT16, and its scale FLOAT; give both one type",
        "integer data": "quantizes INT32; it takes floats of 32 or 16 bits",
        "float64": "Conv computes with floats of 64 bits, which TensorRT does not; export the model in float32",
        "float8 that becomes infinite": "infinite beyond 448; TensorRT clips them: let saturate be 1",
        "int4 activation": "int4 is for weights; give what is computed int8",
        "int8 in blocks": "has blocks, which int8 has not; give each channel a scale",
        "int4 in Conv": "reads int4, which only matrix products do; give it int8, or leave it float",
        "int4 without blocks": "int4 without blocks; TensorRT takes such of 64 or 128",
        "int4 in blocks of 32": "int4 in blocks of 32; TensorRT takes 64 or 128",
        "int4 in blocks along the stack": "its blocks lie along neither of the last two sides of the weight",
        "int32 bias": "its bias is quantized; leave biases float",
        "int8 offset": "adds a quantized constant to the result of MatMul; leave biases float",
        "zero point of one channel": "its zero point is 1; quantize symmetrically, around 0",
        "zero point at run time": "its zero point is computed; it must be a constant of zeros",
        "scale at run time": "its scale is computed; it must be a constant, which depends on no input and no shape",
        "scale of 0": "a scale is not above 0, or not finite",
        "scales of four sides": r"its scales have the shape \[16, 1, 1, 1\]; give them one side, as long as that",
        "axis of no side": "its axis 7 is no side of a tensor that has 4",
        "eight scales of sixteen channels": r"shape \[8\]; a tensor of the shape \[16, 16, 3, 3\] has, along axis 0,",
        "scales of other blocks": r"shape \[128, 2\]; a tensor of the shape \[128, 128\] has, along axis 0, \[2, 128\]",
        "one zero point of sixteen scales": r"its zero point has the shape \[\], and its scale \[16\]; give both the",
        "activation per channel": "16 scales of a value that is computed; give it one for the whole tensor",
        "Conv of axis 1": "the scales of a weight of Conv lie along axis 1; its output channels lie on 0",
        "Transpose and MatMul of axis 1": "lie along axis 1, which becomes 0; its output channels lie on 1",
        "grouped ConvTranspose": "has groups and a weight with a scale for each channel; give it one scale, or",
        "Conv of float weight": "its weight is not quantized, though the other is: it runs in float; quantize all, or",
        "Conv of float activation": "its input is not quantized, though the other is",
        "int4 by int8": "its weight is int4, and its input is quantized; such weights are multiplied with floats",
        "float8 by int8": "its operands are FLOAT8E4M3FN and INT8; give both the same integers",
        "pair between Conv and Relu": "lies between Conv and Relu, which do not fuse then; put it behind",
        "pair between Conv and LeakyRelu": "lies between Conv and LeakyRelu, which do not fuse then; put it behind",
        "pairs within SiLU": "lies between Conv and Sigmoid and Mul, which do not fuse then; put it behind",
        "both branches": "both branches are quantized; quantize only the one that does not come from the convolution",
        "wrong branch": "the branch that comes from the convolution is quantized; quantize only the other one",
        "identity in float": "adds a float to a convolution in integers, which is quantized for others; let it read",
        "quantized twice": "quantizes 'relu', as 'relu_Q' does; let one serve all",
        "axis of Q alone": "has scales along another axis than its inverse, 'w_DQ'; give both the same",
        "another scale than its inverse": "has other scales than its inverse, 'x_DQ'; give both the same",
        "MatMulInteger": "reads the integers of 'x_Q' itself; a DequantizeLinear must come between",
        "integers returned": "its integers are an output; return floats, behind a DequantizeLinear",
        "integers of a Cast": "reads integers that Cast computes; only a QuantizeLinear may, a constant or an input",
        "scalar": "quantizes a scalar; leave it float",
        "scalar in int8": "dequantizes a scalar; leave it float",
        "Add of bytes": "Add computes with UINT8, which only inputs and outputs are; cast it to INT32 or to floats",
        "bytes between floats": "Cast computes with UINT8, which only inputs and outputs are",
        "Add of int16": "Add reads INT16, of which TensorRT has no values; use INT32 or INT64",
        "Identity of strings": "Identity reads STRING, of which TensorRT has no values; let numbers stand for it",
        "Add of int8": "Add computes with INT8 that no QuantizeLinear made; cast it to INT32 or to floats",
        "Squeeze of what may be 1": "has no axes, and sides that may or may not be 1 when it runs; say which axes",
        "rank of what is found": "as many sides as 'row' has elements, whose number must be fixed",
        "experts of axis 1": "lie along axis 1, which becomes 0; its output channels lie on 1",
        "experts with a scale each": "lie along axis 0, from which Gather picks; its output channels lie on 1",
        "MatMul of float key": "its operand 1 is not quantized, though the other is: it runs in float",
        "Concat of two scales": "joins tensors of the scales 0.05, 0.1; give all of them one",
        "Add with a float constant": "only 1 of its 2 operands are quantized: it runs in float; quantize all, or none",
        "Add of float result": "its operands are quantized, and its result is not: it runs in float; quantize all, or",
        "pair that nothing reads": "only an output reads what it makes, which is float: the pair costs time",
        "opset 8": "opset 8 is outside 9 to 25; export with one of these",
        "unknown rank": "the input 'x' has no rank; sides may be dynamic, ranks may not",
        "rank of an input's length": "as many sides as 'sizes' has elements, whose number must be fixed",
        "QLinearConv": "QLinearConv is not imported; write float operators between QuantizeLinear and its inverse",
        "operator of com.microsoft": "com.microsoft.FusedMatMul is no operator of ONNX; it needs a plugin of",
        "float4 as a pair of another name": "trt.TRT_FP4QDQ is no operator of ONNX; it needs a plugin of TensorRT's",
        "Unique": "Unique is not imported; write it in other operators, or as a plugin of TensorRT's",
        "attention of a float key": "its key is not quantized, though others are: it runs in float; quantize all, or",
        "Einsum of a float weight": "its operand 1 is not quantized, though the other is",
        "Einsum of scales along what is summed": "a weight of Einsum lie along axis 0; its output channels lie on 1",
        "int8 and float8 in two layers": "is float8, and 'x_Q' is int8: TensorRT builds no network that has both",
        "float8 scales as they are": "its scale is FLOAT8E4M3FN; give it a float, or what dequantizes it",
        "exponents of blocks of 16": "its scales are exponents alone, as float8 in blocks of 32 has them; give",
        "other blocks than its inverse": "has other blocks than its inverse, 'w_DQ'; give both the same",
        "quantized again": "quantizes what 'x_DQ' has just dequantized; read that",
        "input in blocks of 16": "float8e4m3fn in blocks of 16; TensorRT takes 32",
        "int32 weight": "its integers are INT32; TensorRT computes with INT8",
        "TopK of 3841": "TopK finds the 3,841 largest, of which TensorRT takes 3,840 at most; ask for fewer",
        "branches of two ranks": r"its branches return tensors of the ranks \[2\] and \[0\]; they must be alike",
        "int4 at opset 18": "ONNX refuses it: Unrecognized attribute: block_size for operator DequantizeLinear",
    }.items(),
)
def test_a_violation_says_what_is_wrong_and_what_to_do(name, message):
    planted, *_ = PLANTED[name]
    assert any(re.search(message, violation.message) for violation in find_violations(planted()))


def test_blocks_are_told_of_both_of_a_pair():
    assert [violation.node for violation in find_violations(quantized_in_blocks(32))] == ["w_Q", "w_DQ"]


def test_each_rule_has_a_violation_that_is_planted_here_or_among_odd_files():
    broken = {rule for _, rules, _ in PLANTED.values() for rule in rules.split()}
    assert broken | {"empty", "form"} == {*GRAPH_RULES, *FILE_RULES}


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (partial(blockwise, block=32), []),
        (partial(blockwise, weight=Kind.INT8), []),
        (few_bits_first, []),
        (partial(float_convolution, Kind.FLOAT16, Kind.INT4, block_size=64), ["blocks"]),
        (partial(float_convolution, held=Kind.INT8), ["all-inputs"]),
        (partial(convolution, 21, stored=Kind.INT4), ["all-inputs", "blocks"]),
    ],
)
def test_weights_alone_are_excused_where_products_read_them_and_nowhere_else(model, rules):
    assert sorted({violation.rule for violation in find_violations(model(), has_weights_alone=True)}) == rules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4 activation", "[all-inputs] gemm: its input is int4, and its weight is not; give both the same integers"),
        ("int4 in Conv", "[all-inputs] out: its weight is int4, which only matrix products read; give it int8, or"),
        ("int4 by int8", "[all-inputs] out: its weight is int4, and its input is quantized; such weights are"),
    ],
)
def test_an_operand_is_called_what_it_is(name, message):
    planted, *_ = PLANTED[name]
    assert any(str(violation).startswith(message) for violation in find_violations(planted()))
