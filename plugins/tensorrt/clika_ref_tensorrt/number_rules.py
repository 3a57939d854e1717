"""Rules of TensorRT about types, scales and zero points, and about where weights have theirs."""

from __future__ import annotations

import numpy as np
import onnx

from clika_ref_tensorrt.axes import moved_axis
from clika_ref_tensorrt.onnx_file import DEQUANTIZE, NOTHING, QUANTIZE, OnnxFile
from clika_ref_tensorrt.rule_book import CONVOLUTIONS, TYPES, WEIGHTED, Found, rule

BLOCKS: dict[int, tuple[int, ...]] = {TYPES.INT4: (64, 128), TYPES.FLOAT4E2M1: (16,), TYPES.FLOAT8E4M3FN: (32,)}
"""How many elements share a scale, by the type of integers that may."""

FLOATS = (TYPES.FLOAT, TYPES.FLOAT16, TYPES.BFLOAT16)
COMPUTED = (TYPES.INT8, *BLOCKS)
FROM_OPSET: dict[int, int] = {TYPES.INT4: 21, TYPES.UINT4: 21, TYPES.FLOAT8E4M3FN: 19, TYPES.FLOAT4E2M1: 23}


@rule("integer-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind = file.integer_type(node)
        if kind == TYPES.INT32:
            continue  # a bias, of which another rule speaks
        if kind not in COMPUTED:
            name = TYPES.DataType.Name(kind) if kind else "unknown"
            yield node, f"its integers are {name}; TensorRT computes with INT8: give a zero point of int8 zeros"


@rule("type-needs-opset")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        kind, scale = file.integer_type(node), file.constant(node.input[1])
        needed = FROM_OPSET.get(kind, 13 if scale is not None and scale.size > 1 else 10)
        needed = 21 if file.attribute(node, "block_size", 0) else needed
        if file.opset < needed:
            yield node, f"needs opset {needed} by its type, axis or blocks, and the file has {file.opset}"


@rule("zero-point")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        if len(node.input) > 2 and node.input[2]:
            zero = file.constant(node.input[2])
            if zero is None:
                yield node, "its zero point is computed; it must be a constant of zeros"
            elif np.any(zero.astype(np.float32) != 0):
                yield node, f"its zero point is {zero.flat[np.flatnonzero(zero)[0]]}; quantize symmetrically, around 0"


@rule("scale")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is None:
            yield node, "its scale is computed; it must be a constant, which depends on no input and no shape"
        elif not np.all(np.isfinite(scale.astype(np.float64)) & (scale.astype(np.float64) > 0)):
            yield node, "a scale is not above 0, or not finite"


@rule("data-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        given = file.types.get(node.input[0], 0)
        if given and given not in FLOATS:
            yield node, f"quantizes {TYPES.DataType.Name(given)}; it takes floats of 32 or 16 bits"


@rule("scale-type")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE):
        given, scale = (file.types.get(name, 0) for name in node.input[:2])
        if given in (TYPES.FLOAT16, TYPES.BFLOAT16) and scale not in (0, given):
            yield node, f"its input is {TYPES.DataType.Name(given)}, and its scale {TYPES.DataType.Name(scale)}"


@rule("activation-per-tensor")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is not None and scale.size > 1 and not file.is_weight(node):
            yield node, f"{scale.size} scales of a value that is computed; give it one for the whole tensor"


@rule("blocks")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(DEQUANTIZE):
        kind, block = file.integer_type(node), int(file.attribute(node, "block_size", 0))
        if file.has_weights_alone and file.is_weight(node):
            continue
        name, taken = TYPES.DataType.Name(kind).lower(), " or ".join(map(str, BLOCKS.get(kind, ())))
        if kind == TYPES.INT4 and not file.is_weight(node):
            yield node, "int4 is for weights; give what is computed int8"
        elif block and not taken:
            yield node, f"has blocks, which {name} has not; give each channel a scale"
        elif block not in BLOCKS.get(kind, (0,)) and (block or kind == TYPES.INT4):
            yield node, f"{name} in blocks of {block}; TensorRT takes {taken}"
        if block and taken:
            yield from _misplaced_blocks(file, node, name)


def _misplaced_blocks(file: OnnxFile, node: onnx.NodeProto, name: str) -> Found:
    scale = file.constant(node.input[1])
    if scale is not None and scale.ndim and int(file.attribute(node, "axis", 1)) % scale.ndim < scale.ndim - 2:
        yield node, "its blocks lie along neither of the last two sides of the weight"
    for reader in file.sinks(node.output[0], NOTHING | {"Transpose", "Reshape"}):
        if reader.op_type not in ("MatMul", "Gemm"):
            yield reader, f"reads {name} in blocks, which only matrix products do; give it int8, or leave it float"


@rule("weight-axis")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        for position in (0, 1) if node.op_type == "MatMul" else (1,):
            yield from _misplaced_scales(file, node, position)


def _misplaced_scales(file: OnnxFile, node: onnx.NodeProto, position: int) -> Found:
    made = file.dequantizer(node.input[position])
    scale = file.constant(made.input[1]) if made is not None and file.is_weight(made) else None
    if made is None or scale is None or scale.size == 1 or file.attribute(made, "block_size", 0):
        return
    axis = moved_axis(file, node.input[position], made)
    rank = file.rank(node.input[position])
    wanted = None if rank is None else _channel_axis(file, node, rank, position)
    if None not in (axis, wanted) and axis != wanted:
        own = int(file.attribute(made, "axis", 1))
        where = f"axis {own}" if own % (rank or 1) == axis else f"axis {own}, which becomes {axis},"
        yield made, f"the scales of a weight of {node.op_type} lie along {where}; its output channels on {wanted}"


def _channel_axis(file: OnnxFile, node: onnx.NodeProto, rank: int, position: int) -> int:
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "Gemm":
            return 0 if file.attribute(node, "transB", 0) else 1
        case _:
            return rank - 1 if position else max(rank - 2, 0)


@rule("transposed-groups")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("ConvTranspose"):
        made = file.dequantizer(node.input[1])
        if made is not None and int(file.attribute(node, "group", 1)) > 1:
            scale = file.constant(made.input[1])
            if scale is not None and scale.size > 1:
                yield (
                    node,
                    "has groups and a weight with a scale for each channel; give it one scale, or leave it float",
                )


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
