"""TensorRT rules on types, and on block-wise quantization."""

from __future__ import annotations

import onnx

from clika_ref_tensorrt.onnx_file import FLOAT_TYPES, IDENTITY_OPERATORS, OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, DYNAMIC_QUANTIZERS, MXFP8_BLOCK_SIZE, QUANTIZE, TENSORRT_DOMAIN
from clika_ref_tensorrt.placement_rules import is_read_by_layers
from clika_ref_tensorrt.rule_book import (
    CONVOLUTION_OPERATORS,
    LOW_BIT_TYPES,
    MATMUL_OPERATORS,
    QUANTIZED_TYPES,
    TYPES,
    WEIGHTED_OPERATORS,
    Violations,
    rule,
    type_name,
)

BLOCK_SIZES: dict[int, tuple[int, ...]] = {
    TYPES.INT4: (64, 128),
    TYPES.FLOAT4E2M1: (16,),
    TYPES.FLOAT8E4M3FN: (MXFP8_BLOCK_SIZE,),
}
"""Allowed block sizes (elements per scale) by quantized type."""

MIN_OPSETS: dict[int, int] = {
    TYPES.FLOAT16: 19, TYPES.BFLOAT16: 19, TYPES.FLOAT8E4M3FN: 19, TYPES.INT4: 21, TYPES.UINT4: 21,
    TYPES.FLOAT4E2M1: 23, TYPES.FLOAT8E8M0: 24,
}  # fmt: skip
"""First opset with quantizers for a type, quantized or float; 10 for others."""


BEFORE_PRODUCT_OPERATORS = IDENTITY_OPERATORS | {"Transpose", "Reshape", "Cast", "Gather", "Squeeze", "Unsqueeze"}
"""Operators allowed between a block-wise weight and its product, for example to select one of several experts."""


@rule("integer-type")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        if kind == TYPES.INT32 and not is_read_by_layers(file, node):
            continue  # a bias, which another rule reports
        if kind not in QUANTIZED_TYPES:
            name = type_name(kind) if kind else "unknown"
            yield (
                node,
                f"its quantized type is {name}, but TensorRT computes with INT8. Use a zero point of int8 zeros.",
            )


@rule("type-needs-opset")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        if node.domain == TENSORRT_DOMAIN:
            continue
        kinds = (file.integer_type(node), *(file.types.get(name, 0) for name in node.input[:2]))
        scale = file.shape(node.input[1])
        needed = max(MIN_OPSETS.get(kind, 10) for kind in kinds)
        needed = max(needed, 13 if scale and scale != [1] else 10)
        needed = max(needed, 21 if file.block(node) else 10)
        if file.opset < needed:
            yield node, f"needs opset {needed} for its types, axis or blocks, but the file has {file.opset}"


@rule("int8-with-float8")
def _(file: OnnxFile) -> Violations:
    if file.enclosing is not None:
        return  # the check of the outermost graph covers this one
    first = dict[int, onnx.NodeProto]()
    for graph in (file, *file.inner_graphs):
        for node in graph.nodes_of_type(QUANTIZE, DEQUANTIZE):
            first.setdefault(graph.integer_type(node), node)
    if TYPES.INT8 in first and TYPES.FLOAT8E4M3FN in first:
        other, node = first[TYPES.INT8], first[TYPES.FLOAT8E4M3FN]
        yield node, f"is float8, but {other.name!r} is int8. TensorRT does not support both in one network: choose one."


@rule("scale-type")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        given, scale = (file.types.get(name, 0) for name in node.input[:2])
        is_exponent = scale == TYPES.FLOAT8E8M0 or (node.domain == TENSORRT_DOMAIN and scale == TYPES.UINT8)
        if is_exponent:
            if (file.integer_type(node), file.block(node)) != (TYPES.FLOAT8E4M3FN, MXFP8_BLOCK_SIZE):
                yield (
                    node,
                    (f"its scales are only exponents, as of float8 in blocks of {MXFP8_BLOCK_SIZE}. Use float scales."),
                )
        elif scale not in (0, *FLOAT_TYPES):
            yield node, f"its scale is {type_name(scale)}. Use a float, or a dequantized scale."
        elif node.op_type == QUANTIZE and given in FLOAT_TYPES and scale and given != scale:
            yield node, f"its input is {type_name(given)}, but its scale {type_name(scale)}. Use one type for both."


@rule("saturation")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE):
        if file.integer_type(node) == TYPES.FLOAT8E4M3FN and not file.attribute(node, "saturate", 1):
            yield node, "rounds 8-bit floats beyond 448 to infinity, but TensorRT clips them. Set saturate to 1."


@rule("blocks")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        is_any_taken = file.has_weight_only and file.is_weight(node)
        name, taken = type_name(kind).lower(), " or ".join(map(str, BLOCK_SIZES.get(kind, ())))
        if not is_any_taken:
            yield from _check_block_support(file, node, name, taken)
        if (file.block(node) or kind in LOW_BIT_TYPES) and (taken or is_any_taken):
            yield from _check_block_axis(file, node, name)
    for node in file.nodes_of_type(*DYNAMIC_QUANTIZERS):
        kind, stated = DYNAMIC_QUANTIZERS[node.op_type][0], int(file.attribute(node, "block_size", 0))
        if stated and stated not in BLOCK_SIZES.get(kind, (stated,)):
            taken = " or ".join(map(str, BLOCK_SIZES[kind]))
            yield node, f"{type_name(kind).lower()} in blocks of {stated} is not supported. TensorRT supports {taken}."


def _check_block_support(file: OnnxFile, node: onnx.NodeProto, name: str, taken: str) -> Violations:
    kind, block = file.integer_type(node), file.block(node)
    if kind == TYPES.INT4 and not file.is_weight(node):
        yield node, "int4 is for weights only. Use int8 for activations."
    elif block and not taken:
        yield node, f"has blocks, which {name} does not support. Use a scale for each channel."
    elif block and block not in BLOCK_SIZES.get(kind, (0,)):
        yield node, f"{name} in blocks of {block} is not supported. TensorRT supports {taken}."
    elif kind == TYPES.INT4 and not block and not _non_product_readers(file, node):
        yield node, f"{name} without blocks is not supported. TensorRT supports blocks of {taken}."


def _check_block_axis(file: OnnxFile, node: onnx.NodeProto, name: str) -> Violations:
    rank = file.rank(node.input[1])
    if file.block(node) and rank and file.axis(node, rank) < rank - 2:
        yield node, "its blocks are not on one of the last two dims of the weight"
    if node.op_type == QUANTIZE:
        return
    description = f"{name} in blocks" if file.block(node) else name
    for reader in _non_product_readers(file, node):
        yield reader, f"reads {description}, which only matrix products support. Use int8, or keep it float."


def _non_product_readers(file: OnnxFile, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the readers of a dequantized value other than matrix products."""
    inverses = [node] if node.op_type == DEQUANTIZE else file.dequantizers_of(node.output[0])
    readers = [reader for one in inverses for reader in file.sinks(one.output[0], BEFORE_PRODUCT_OPERATORS)]
    return [reader for reader in readers if reader.op_type not in MATMUL_OPERATORS]


@rule("float-bias")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(*CONVOLUTION_OPERATORS, "Gemm"):
        if len(node.input) > 2 and file.dequantizer(node.input[2]) is not None:
            yield node, "its bias is quantized. Keep biases float."
    for node in file.nodes_of_type("Add"):
        made = [file.source(name) for name in node.input]
        for one, other in (made, made[::-1]):
            is_constant = other is not None and other.op_type == DEQUANTIZE and file.is_weight(other)
            if one is not None and one.op_type in WEIGHTED_OPERATORS and is_constant:
                yield node, f"adds a quantized constant to the result of {one.op_type}. Keep biases float."
