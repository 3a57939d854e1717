"""Track the position of a weight's axis through operators that move elements."""

from __future__ import annotations

import math

import onnx

from clika_ref_tensorrt.onnx_file import IDENTITY_OPERATORS, OnnxFile

REMOVED_AXIS = -1
"""Position of an axis after Gather selected from it: it is no axis any more."""


def track_axis(file: OnnxFile, name: str, made: onnx.NodeProto) -> int | None:
    """Return the position of a dequantizer's scale axis in a value moved from its result.

    None if unknown, `REMOVED_AXIS` if it is no axis of that value.
    """
    known, path = file.compute_once(_axis_cache), list[tuple[onnx.NodeProto, str]]()
    while name not in made.output and name not in known:
        node = file.producers[name]  # exists, as the value was moved from that result
        path.append((node, name))
        name = node.input[0]
    if name not in known:
        rank = file.rank(name)
        axis = file.axis(made, rank) if rank is not None else None
        known[name] = axis if axis in range(rank or 0) else None  # another rule reports it
    axis = known[name]
    for node, result in reversed(path):
        axis = known[result] = _axis_after(file, node, result, axis) if axis is not None else None
    return axis


def _axis_cache(_: OnnxFile) -> dict[str, int | None]:
    """Return a cache for the results of `track_axis` in a graph."""
    return {}


def find_kept_axes(equation: str, position: int) -> list[int]:
    """Return the axes of an Einsum operand that are also axes of its result; empty if it has an ellipsis."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    own = "".join(operands.split(",")[position : position + 1])
    result = result if arrow else "".join(label for label in operands if operands.count(label) == 1)
    return [] if "." in own else [axis_index for axis_index, label in enumerate(own) if label in result]


def _axis_after(file: OnnxFile, node: onnx.NodeProto, name: str, axis: int) -> int | None:
    """Return the position of an axis after a node."""
    if axis == REMOVED_AXIS:
        return REMOVED_AXIS
    match node.op_type:
        case "Transpose":
            rank = file.rank(name) or 0
            order = [*file.attribute(node, "perm", [*range(rank)][::-1])]
            return order.index(axis) if axis in order else None
        case "Unsqueeze" | "Squeeze":
            return _axis_after_unit_axes(file, node, name, axis)
        case "Reshape" | "Flatten":
            return _axis_after_reshape(file, node.input[0], name, axis)
        case "Gather":
            return _axis_after_gather(file, node, axis)
        case kind:
            return axis if kind in {*IDENTITY_OPERATORS, "Cast"} else None


def _axis_after_unit_axes(file: OnnxFile, node: onnx.NodeProto, name: str, axis: int) -> int | None:
    """Return the position of an axis after axes of size 1 are inserted or removed."""
    stated = file.constant(node.input[1]) if len(node.input) > 1 else None
    axes = file.attribute(node, "axes", None) if stated is None else stated.flatten().tolist()
    rank = file.rank(name if node.op_type == "Unsqueeze" else node.input[0])
    if not axes or not rank:
        return None
    axis_numbers = {int(axis_number) % rank for axis_number in axes}
    if node.op_type == "Squeeze":
        return axis - sum(axis_number < axis for axis_number in axis_numbers)
    left = [axis_number for axis_number in range(rank) if axis_number not in axis_numbers]
    return left[axis] if axis < len(left) else None


def _axis_after_reshape(file: OnnxFile, before: str, after: str, axis: int) -> int | None:
    """Return the axis with the same size and the same number of elements before it."""
    old, new = file.shape(before), file.shape(after)
    if old is None or new is None or axis >= len(old):
        return None
    leading = math.prod(old[:axis])
    return next(
        (i for i, axis_index in enumerate(new) if axis_index == old[axis] and math.prod(new[:i]) == leading), None
    )


def _axis_after_gather(file: OnnxFile, node: onnx.NodeProto, axis: int) -> int | None:
    """Return the position of an axis after Gather, which replaces its own axis by the axes of the indices."""
    rank, axis_numbers = file.rank(node.input[0]), file.rank(node.input[1])
    if rank is None or axis_numbers is None:
        return None
    picked = int(file.attribute(node, "axis", 0)) % max(rank, 1)
    if axis == picked:
        return REMOVED_AXIS
    return axis if axis < picked else axis + axis_numbers - 1
