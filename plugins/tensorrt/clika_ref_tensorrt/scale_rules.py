"""TensorRT rules on scales and zero points, and on the scale axis of weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from clika_ref.core.errors import format_count
from clika_ref_tensorrt.axes import REMOVED_AXIS, find_kept_axes, track_axis
from clika_ref_tensorrt.onnx_file import ORDER_KEEPING_OPERATORS, OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, DYNAMIC_QUANTIZERS, QUANTIZE, TYPES
from clika_ref_tensorrt.rule_book import CONVOLUTION_OPERATORS, WEIGHTED_OPERATORS, Violations, factors_of, rule


@rule("zero-point")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        if len(node.input) > 2 and node.input[2]:
            zero = file.constant(node.input[2])
            if zero is None:
                yield node, "its zero point is computed. Use a constant of zeros."
            elif np.any(zero.astype(np.float32) != 0):
                yield node, f"its zero point is {zero.flat[np.flatnonzero(zero)[0]]}. Quantize symmetrically, around 0."


@rule("scale")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is None:
            if not _is_dynamic(file, node):
                yield node, "its scale is computed. Use a constant that does not depend on inputs or shapes."
        elif file.types.get(node.input[1]) == TYPES.UINT8:
            continue  # exponents of MXFP8, or of a type that another rule reports
        elif not np.all(np.isfinite(scale.astype(np.float64)) & (scale.astype(np.float64) > 0)):
            yield node, "a scale is not above 0, or not finite"


def _is_dynamic(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether the input and its block scales, possibly quantized themselves, come from one dynamic quantizer."""
    made = [file.source(name, ORDER_KEEPING_OPERATORS) for name in node.input[:2]]
    if made[1] is not None and made[1].op_type == DEQUANTIZE:
        made[1] = file.source(made[1].input[0], ORDER_KEEPING_OPERATORS)
    return made[0] is not None and made[0] is made[1] and made[0].op_type in DYNAMIC_QUANTIZERS


@rule("scale-shape")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        scale, data = file.shape(node.input[1]), file.dims(node.input[0])
        zero = file.shape(node.input[2]) if len(node.input) > 2 else None
        if scale is None:
            continue
        if fault := _shape_fault(file, node, scale, data):
            yield node, fault
        if zero is not None and zero != scale and (len(zero) > 1 or {*zero, *scale} != {1}):
            yield node, f"its zero point has the shape {zero}, but its scale {scale}. Use one shape for both."


def _shape_fault(file: OnnxFile, node: onnx.NodeProto, scale: list[int], data: Sequence[int | None] | None) -> str:
    """Return why the shape of the scales does not fit the data; empty if it does."""
    block = file.block(node)
    if not block and len(scale) > 1:
        return f"its scales have the shape {scale}. Use a scalar, or one dim with a scale for each channel."
    if data is None or scale in ([], [1]):
        return ""
    axis = file.axis(node, len(data))
    if axis not in range(len(data)):
        dims = format_count(len(data), "dim")
        return f"its axis {file.attribute(node, 'axis', 1)} does not exist in a tensor with {dims}"
    sizes = [(-(-size // block) if block and at == axis and size else size) for at, size in enumerate(data)]
    expected = sizes if block else [sizes[axis]]
    if len(expected) != len(scale) or any(size not in (None, own) for size, own in zip(expected, scale, strict=True)):
        return f"its scales have the shape {scale}, but a tensor of the shape {data} has {expected} on axis {axis}"
    return ""


@rule("activation-per-tensor")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(QUANTIZE, DEQUANTIZE):
        scale = file.constant(node.input[1])
        if scale is not None and scale.size > 1 and not file.is_weight(node):
            yield node, f"{scale.size} scales of an activation. Use one scale for the whole tensor."


@rule("weight-axis")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type(*WEIGHTED_OPERATORS):
        for position in range(1 if node.op_type in CONVOLUTION_OPERATORS else 0, len(factors_of(node))):
            yield from _check_scale_axis(file, node, position)


def _check_scale_axis(file: OnnxFile, node: onnx.NodeProto, position: int) -> Violations:
    made = file.dequantizer(node.input[position])
    scale = file.constant(made.input[1]) if made is not None and file.is_weight(made) else None
    if made is None or scale is None or scale.size <= 1 or file.block(made):
        return
    axis = track_axis(file, node.input[position], made)
    rank = file.rank(node.input[position])
    expected = None if rank is None else _channel_axis(file, node, rank, position, axis)
    if None not in (axis, expected) and axis != expected:
        own = int(file.attribute(made, "axis", 1))
        moved = "from which Gather selects" if axis == REMOVED_AXIS else f"which becomes {axis}"
        where = f"axis {own}" if own % (rank or 1) == axis else f"axis {own}, {moved}"
        yield (
            made,
            f"the scales of a weight of {node.op_type} are on {where}, but its output channels are on {expected}",
        )


def _channel_axis(file: OnnxFile, node: onnx.NodeProto, rank: int, position: int, axis: int | None) -> int | None:
    """Return the output channel axis of a weight; of several, the one with the scales."""
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "Gemm":
            is_turned = file.attribute(node, "transB" if position else "transA", 0)
            return int(bool(is_turned) != bool(position))
        case "Einsum":
            kept = find_kept_axes(file.attribute(node, "equation", b"").decode(), position)
            return axis if axis in kept else next(iter(kept), None)
        case _:
            return rank - 1 if position else max(rank - 2, 0)


@rule("transposed-groups")
def _(file: OnnxFile) -> Violations:
    for node in file.nodes_of_type("ConvTranspose"):
        made = file.dequantizer(node.input[1])
        if made is not None and int(file.attribute(node, "group", 1)) > 1:
            scale = file.constant(made.input[1])
            if scale is not None and scale.size > 1:
                yield (
                    node,
                    "has groups and a scale for each channel of its weight. Use one scale, or keep it float.",
                )
