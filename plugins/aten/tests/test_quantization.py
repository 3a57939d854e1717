"""``quantize`` and ``dequantize``: ties, limits, the forms of PyTorch's calls, and rejected calls."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers PyTorch's own quantizers
from clika_ref_aten.quantization import dequantize, quantize
from one_operator import Case, build_case_graph, run_onnx

from clika_ref.core.errors import ModelError, PassError
from clika_ref.core.inference import Builder, infer_types
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

Q = torch.ops.quantized_decomposed
X = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
SCALES = torch.tensor([0.5, 0.03125, 1.0])  # powers of two: a product with the reciprocal is the quotient
ZERO_POINTS = torch.tensor([0, 3, -128])


def run_onnx_and_compare(op, *operands, **attrs):
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    (actual,) = run_onnx(build_case_graph(case), case.tensors)
    assert torch.equal(actual, op(*call.operands, **call.attrs)), str(case)
    return actual


def test_quantize_ties_round_to_even():
    """Ties round to the even neighbour."""
    halves = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert run_onnx_and_compare(quantize, halves, 1.0, 0).tolist() == [-2, -2, 0, 0, 2, 2]
    assert run_onnx_and_compare(quantize, halves, 1.0, 7).tolist() == [5, 5, 7, 7, 9, 9]


def test_quantize_out_of_bounds_saturates():
    """Elements beyond the quantized range saturate."""
    x = torch.tensor([-torch.inf, -1e30, 1e30, torch.inf])
    assert run_onnx_and_compare(quantize, x, 0.1, -128).tolist() == [-128, -128, 127, 127]
    assert run_onnx_and_compare(quantize, x, 0.1, 127, quant_min=-127).tolist() == [-127, -127, 127, 127]
    assert run_onnx_and_compare(quantize, x, 0.1, 3, dtype=torch.uint8, quant_max=15).tolist() == [0, 0, 15, 15]


def test_quantize_zero_point_added_before_clamp():
    """The zero point is added before the clamp."""
    assert run_onnx_and_compare(quantize, torch.tensor([-10.0, 20.0]), 0.1, 100).tolist() == [0, 127]


def test_quantize_square_weight_uses_scale_of_axis():
    """Each channel of a square weight has its own scale."""
    w = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 0])
    assert run_onnx_and_compare(quantize, w, scales, zeros, axis=0).tolist() == [[2, 2], [4, 4]]
    assert run_onnx_and_compare(quantize, w, scales, zeros, axis=-1).tolist() == [[2, 4], [2, 4]]
    q = torch.tensor([[1, 1], [1, 1]], dtype=torch.int8)
    assert run_onnx_and_compare(dequantize, q, scales, zeros, axis=1).tolist() == [[0.5, 0.25], [0.5, 0.25]]


def test_dequantize_int32_bias_keeps_digits():
    """INT32 biases keep their digits."""
    q = torch.tensor([2**31 - 1, -(2**31), 12345], dtype=torch.int32)
    assert run_onnx_and_compare(dequantize, q, 2.0**-10).tolist() == [2.0**21, -(2.0**21), 12345 / 1024]
    run_onnx_and_compare(dequantize, q, SCALES, ZERO_POINTS, axis=0)


FORMS = [
    (quantize, Q.quantize_per_tensor.default, (X, 0.25, 3, -128, 127, torch.int8)),
    (quantize, Q.quantize_per_tensor.default, (X, 0.25, 3, 0, 15, torch.uint8)),
    (quantize, Q.quantize_per_tensor.tensor, (X, torch.tensor(0.25), torch.tensor(3), -8, 7, torch.int8)),
    (quantize, Q.quantize_per_channel.default, (X, SCALES, ZERO_POINTS, 1, -127, 127, torch.int8)),
]
CODES = torch.randint(-128, 128, (2, 3, 4), generator=torch.Generator().manual_seed(0)).to(torch.int8)
BACK = [
    (dequantize, Q.dequantize_per_tensor.default, (CODES, 0.3, 3, -128, 127, torch.int8)),
    (dequantize, Q.dequantize_per_tensor.tensor, (CODES, torch.tensor(0.3), torch.tensor(3), -8, 7, torch.int8)),
    (dequantize, Q.dequantize_per_channel.default, (CODES, SCALES, ZERO_POINTS, 1, -128, 127, torch.int8)),
    (dequantize, Q.dequantize_per_channel.default, (CODES, SCALES, None, 1, -128, 127, torch.int8)),
]


@pytest.mark.parametrize(("op", "overload", "args"), FORMS + BACK, ids=str)
def test_converted_pytorch_quantizer_calls_equal_reference(op, overload, args):
    """Calls of PyTorch's own quantizers become ours."""
    call = op.convert_call(overload, *args)
    assert torch.equal(op(*call.operands, **call.attrs), overload(*args))


def test_converted_dequantize_keeps_out_dtype():
    """The out_dtype of PyTorch's call is kept."""
    args = (CODES, 0.5, 3, -128, 127, torch.int8)
    call = dequantize.convert_call(Q.dequantize_per_tensor.default, *args, out_dtype=torch.float16)
    assert call.attrs["dtype"] == torch.float16


FLOAT, CODE = TensorType(torch.float32, (2, 3)), TensorType(torch.int8, (2, 3))
NUMBERS = TensorType(torch.float32, (2,))
REJECTED = [
    (quantize, (FLOAT, 0.1, 0), {"dtype": torch.int32}, "quantize supports torch.int8, torch.uint8, not torch.int32"),
    (
        quantize,
        (FLOAT, 0.1, 0),
        {"quant_max": 128},
        r"\[-128, 128\] must not be empty, and must be within that of torch.int8",
    ),
    (quantize, (FLOAT, 0.1, 0), {"quant_min": 7, "quant_max": 7}, r"\[7, 7\] must not be empty, and must be within"),
    (quantize, (FLOAT, NUMBERS, NUMBERS), {"axis": 2}, r"axis 2 of float32\[2, 3\] does not exist"),
    (quantize, (FLOAT, NUMBERS, NUMBERS), {"axis": 1}, r"must be \[3\], one for each index along axis 1, not float32"),
    (quantize, (FLOAT, NUMBERS, 0), {}, "must be a number or a 0-d tensor, not float32"),
    (dequantize, (FLOAT, 0.1, 0), {}, "dequantize supports torch.int8, torch.uint8, torch.int32, not float32"),
    (dequantize, (CODE, NUMBERS), {"axis": -3}, r"axis -3 of int8\[2, 3\] does not exist"),
]


@pytest.mark.parametrize("axis", [None, 1])
def test_dequantize_signed_codes_without_zero_point_stay_signed(axis):
    """Signed codes without zero points stay signed after a reshape."""
    graph = Graph("moved")
    code = graph.add_input(TensorType(torch.int8, (1, 2)), "code")
    build = Builder(graph, load_registry().operators)
    scale = 0.5 if axis is None else graph.add_constant(torch.tensor([0.5, 0.25]), "scale")
    number = build("dequantize", code, scale, None, dtype=torch.float32, axis=axis)
    graph.add_output(build("reshape", number, shape=(2, 1)))
    (actual,) = run_onnx(graph, [torch.tensor([[-116, 3]], dtype=torch.int8)])
    assert actual.flatten().tolist() == [-58, 1.5 if axis is None else 0.75]


@pytest.mark.parametrize(("op", "operands", "attrs", "message"), REJECTED)
def test_infer_types_invalid_quantize_raises(op, operands, attrs, message):
    """Calls that cannot be quantized raise PassError."""
    call = op.call(*operands, **attrs)
    with pytest.raises(PassError, match=message):
        infer_types(op, call.operands, call.attrs)


def test_quantize_eager_range_beyond_dtype_raises():
    """Eager rejects a quantized range beyond the dtype."""
    with pytest.raises(
        ModelError, match=r"the quantized range \[-1, 15\] must not be empty, and must be within that of torch.uint8"
    ):
        quantize(X, 1.0, 0, dtype=torch.uint8, quant_min=-1, quant_max=15)
