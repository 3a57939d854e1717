"""TensorRT rules on types, and on block-wise quantization."""

from __future__ import annotations

import onnx

from clika_ref_tensorrt.onnx_file import FLOATS, NOTHING, OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, DOMAIN, DYNAMIC, MXFP8, QUANTIZE
from clika_ref_tensorrt.placement_rules import serves_layers
from clika_ref_tensorrt.rule_book import (
    COMPUTED,
    CONVOLUTIONS,
    FEW_BITS,
    PRODUCTS,
    TYPES,
    WEIGHTED,
    Found,
    rule,
    type_name,
)

BLOCKS: dict[int, tuple[int, ...]] = {TYPES.INT4: (64, 128), TYPES.FLOAT4E2M1: (16,), TYPES.FLOAT8E4M3FN: (MXFP8,)}
"""Allowed block sizes (elements per scale) by quantized type."""

FROM_OPSET: dict[int, int] = {
    TYPES.FLOAT16: 19, TYPES.BFLOAT16: 19, TYPES.FLOAT8E4M3FN: 19, TYPES.INT4: 21, TYPES.UINT4: 21,
    TYPES.FLOAT4E2M1: 23, TYPES.FLOAT8E8M0: 24,
}  # fmt: skip
"""First opset with quantizers for a type, quantized or float; 10 for others."""


BETWEEN = NOTHING | {"Transpose", "Reshape", "Cast", "Gather", "Squeeze", "Unsqueeze"}
"""Operators allowed between a block-wise weight and its product, for example to select one of several experts."""


@rule("integer-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        if kind == TYPES.INT32 and not serves_layers(file, node):
            continue  # a bias, which another rule reports
        if kind not in COMPUTED:
            name = type_name(kind) if kind else "unknown"
            yield node, f"its integers are {name}; TensorRT computes with INT8: give a zero point of int8 zeros"


@rule("type-needs-opset")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        if node.domain == DOMAIN:
            continue
        kinds = (file.integer_type(node), *(file.types.get(name, 0) for name in node.input[:2]))
        scale = file.shape(node.input[1])
        needed = max(FROM_OPSET.get(kind, 10) for kind in kinds)
        needed = max(needed, 13 if scale and scale != [1] else 10)
        needed = max(needed, 21 if file.block(node) else 10)
        if file.opset < needed:
            yield node, f"needs opset {needed} by its types, axis or blocks, and the file has {file.opset}"


@rule("int8-beside-float8")
def _(file: OnnxFile) -> Found:
    if file.around is not None:
        return  # the check of the outermost graph covers this one
    first = dict[int, onnx.NodeProto]()
    for graph in (file, *file.within):
        for node in graph.of_kind(QUANTIZE, DEQUANTIZE):
            first.setdefault(graph.integer_type(node), node)
    if TYPES.INT8 in first and TYPES.FLOAT8E4M3FN in first:
        other, node = first[TYPES.INT8], first[TYPES.FLOAT8E4M3FN]
        yield node, f"is float8, and {other.name!r} is int8: TensorRT builds no network that has both; choose one"


@rule("scale-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        given, scale = (file.types.get(name, 0) for name in node.input[:2])
        is_exponent = scale == TYPES.FLOAT8E8M0 or (node.domain == DOMAIN and scale == TYPES.UINT8)
        if is_exponent:
            if (file.integer_type(node), file.block(node)) != (TYPES.FLOAT8E4M3FN, MXFP8):
                yield node, f"its scales are exponents alone, as float8 in blocks of {MXFP8} has them; give it floats"
        elif scale not in (0, *FLOATS):
            yield node, f"its scale is {type_name(scale)}; give it a float, or what dequantizes it"
        elif node.op_type == QUANTIZE and given in FLOATS and scale and given != scale:
            yield node, f"its input is {type_name(given)}, and its scale {type_name(scale)}; give both one type"


@rule("saturation")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        if file.integer_type(node) == TYPES.FLOAT8E4M3FN and not file.attribute(node, "saturate", 1):
            yield node, "makes floats of 8 bits infinite beyond 448; TensorRT clips them: let saturate be 1"


@rule("blocks")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        is_any_taken = file.has_weights_alone and file.is_weight(node)
        name, taken = type_name(kind).lower(), " or ".join(map(str, BLOCKS.get(kind, ())))
        if not is_any_taken:
            yield from _untaken_blocks(file, node, name, taken)
        if (file.block(node) or kind in FEW_BITS) and (taken or is_any_taken):
            yield from _misplaced_blocks(file, node, name)
    for node in file.of_kind(*DYNAMIC):
        kind, stated = DYNAMIC[node.op_type][0], int(file.attribute(node, "block_size", 0))
        if stated and stated not in BLOCKS.get(kind, (stated,)):
            taken = " or ".join(map(str, BLOCKS[kind]))
            yield node, f"{type_name(kind).lower()} in blocks of {stated}; TensorRT takes {taken}"


def _untaken_blocks(file: OnnxFile, node: onnx.NodeProto, name: str, taken: str) -> Found:
    kind, block = file.integer_type(node), file.block(node)
    if kind == TYPES.INT4 and not file.is_weight(node):
        yield node, "int4 is for weights; give what is computed int8"
    elif block and not taken:
        yield node, f"has blocks, which {name} has not; give each channel a scale"
    elif block and block not in BLOCKS.get(kind, (0,)):
        yield node, f"{name} in blocks of {block}; TensorRT takes {taken}"
    elif kind == TYPES.INT4 and not block and not _foreign_readers(file, node):
        yield node, f"{name} without blocks; TensorRT takes such of {taken}"


def _misplaced_blocks(file: OnnxFile, node: onnx.NodeProto, name: str) -> Found:
    rank = file.rank(node.input[1])
    if file.block(node) and rank and file.axis(node, rank) < rank - 2:
        yield node, "its blocks lie along neither of the last two sides of the weight"
    if node.op_type == QUANTIZE:
        return
    held = f"{name} in blocks" if file.block(node) else name
    for reader in _foreign_readers(file, node):
        yield reader, f"reads {held}, which only matrix products do; give it int8, or leave it float"


def _foreign_readers(file: OnnxFile, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the readers of a dequantized value other than matrix products."""
    inverses = [node] if node.op_type == DEQUANTIZE else file.inverses(node.output[0])
    readers = [reader for one in inverses for reader in file.sinks(one.output[0], BETWEEN)]
    return [reader for reader in readers if reader.op_type not in PRODUCTS]


@rule("float-bias")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*CONVOLUTIONS, "Gemm"):
        if len(node.input) > 2 and file.dequantizer(node.input[2]) is not None:
            yield node, "its bias is quantized; leave biases float"
    for node in file.of_kind("Add"):
        made = [file.source(name) for name in node.input]
        for one, other in (made, made[::-1]):
            is_constant = other is not None and other.op_type == DEQUANTIZE and file.is_weight(other)
            if one is not None and one.op_type in WEIGHTED and is_constant:
                yield node, f"adds a quantized constant to the result of {one.op_type}; leave biases float"
