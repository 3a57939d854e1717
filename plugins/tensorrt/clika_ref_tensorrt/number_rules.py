"""Rules of TensorRT about types, scales and zero points, and about where weights have theirs."""

from __future__ import annotations

import numpy as np
import onnx

from clika_ref_tensorrt.onnx_file import DEQUANTIZE, QUANTIZE, OnnxFile
from clika_ref_tensorrt.rule_book import CONVOLUTIONS, TYPES, WEIGHTED, Found, rule

BLOCKS = (64, 128)
FLOATS = (TYPES.FLOAT, TYPES.FLOAT16, TYPES.BFLOAT16)
COMPUTED = (TYPES.INT8, TYPES.INT4, TYPES.FLOAT8E4M3FN)
FROM_OPSET: dict[int, int] = {TYPES.INT4: 21, TYPES.UINT4: 21, TYPES.FLOAT8E4M3FN: 19}


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
        if file.integer_type(node) != TYPES.INT4:
            if file.attribute(node, "block_size", 0):
                yield node, "has blocks, which only int4 weights have; give each channel a scale"
            continue
        block, scale = int(file.attribute(node, "block_size", 0)), file.constant(node.input[1])
        if scale is not None and scale.ndim and int(file.attribute(node, "axis", 1)) % scale.ndim < scale.ndim - 2:
            yield node, "its blocks lie along neither of the last two sides of the weight"
        if block not in BLOCKS:
            yield node, f"int4 weights in blocks of {block}; TensorRT takes {' or '.join(map(str, BLOCKS))}"
        readers = [n for n in file.readers.get(node.output[0], []) if n.op_type not in ("MatMul", "Gemm", "Transpose")]
        for reader in readers:
            yield reader, "reads an int4 weight, which only matrix products do; give it int8, or leave it float"


@rule("weight-axis")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*WEIGHTED):
        for position in (0, 1) if node.op_type == "MatMul" else (1,):
            yield from _misplaced_scales(file, node, position)


def _misplaced_scales(file: OnnxFile, node: onnx.NodeProto, position: int) -> Found:
    turned = file.makers.get(node.input[position])
    turned = turned if turned is not None and turned.op_type == "Transpose" else None
    made = file.dequantizer(node.input[position] if turned is None else turned.input[0])
    scale = file.constant(made.input[1]) if made is not None and file.is_weight(made) else None
    if made is None or scale is None or scale.size == 1 or file.attribute(made, "block_size", 0):
        return
    rank = scale.ndim if scale.ndim > 1 else _rank(file, made.input[0])
    axis, wanted = int(file.attribute(made, "axis", 1)), _channel_axis(file, node, rank, position)
    wanted = wanted if turned is None else file.attribute(turned, "perm", [*range(rank)][::-1])[wanted]
    if axis % max(rank, 1) != wanted:
        yield made, f"the scales of a weight of {node.op_type} lie along axis {axis}; its output channels on {wanted}"


def _rank(file: OnnxFile, name: str) -> int:
    elements = file.constant(name)
    made = file.makers.get(name)
    if elements is None and made is not None and made.op_type == QUANTIZE:
        elements = file.constant(made.input[0])
    return 2 if elements is None else elements.ndim


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
        made = [file.makers.get(name) for name in node.input]
        for one, other in (made, made[::-1]):
            is_constant = other is not None and other.op_type == DEQUANTIZE and file.is_weight(other)
            if one is not None and one.op_type in WEIGHTED and is_constant:
                yield node, f"adds a quantized constant to the result of {one.op_type}; leave biases float"
