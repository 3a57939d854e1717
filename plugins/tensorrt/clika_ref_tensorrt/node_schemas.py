"""Check that nodes have the operands, results and attributes of their operators, which all rules assume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx

VARIADIC_LIMIT = 2**31 - 1
"""Operand limit of variadic operators in ONNX schemas."""


def find_malformed_nodes(nodes: Iterable[onnx.NodeProto], opset: int) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield each node that violates the ONNX schema of its operator at an opset, with the reason."""
    for node in nodes:
        schema = _schema(node.op_type, opset)
        if schema is not None and (fault := _fault(node, schema)):
            yield node, f"{fault}. Other rules are checked after this is fixed."


def _schema(operator: str, opset: int) -> Any:
    """Return the ONNX schema of an operator at an opset, the latest one for a newer operator, or None."""
    if onnx.defs.has(operator, opset):
        return onnx.defs.get_schema(operator, opset)
    return onnx.defs.get_schema(operator) if onnx.defs.has(operator) else None


def _fault(node: onnx.NodeProto, schema: Any) -> str:
    counts = (
        ("operands", len(node.input), schema.min_input, schema.max_input),
        ("results", len(node.output), schema.min_output, schema.max_output),
    )
    for role, count, minimum, maximum in counts:
        if not minimum <= count <= maximum:
            return f"has {count} {role}, but {node.op_type} has {_count_text(minimum, maximum)}"
    # Attributes newer than the opset are reported by the opset rule.
    taken = {**onnx.defs.get_schema(node.op_type).attributes, **schema.attributes}
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            whose = f"refers to {attribute.ref_attr_name!r} of a function, but the node is not in a function"
            return f"its attribute {attribute.name} {whose}"
        expected = taken[attribute.name].type if attribute.name in taken else None
        if expected is not None and attribute.type != int(expected.value):
            stated = onnx.AttributeProto.AttributeType.Name(attribute.type)
            return f"has an attribute {attribute.name} of the type {stated}, but {node.op_type} takes {expected.name}"
    given = {attribute.name for attribute in node.attribute}
    lacking = [name for name, declared in schema.attributes.items() if declared.required and name not in given]
    return f"lacks {', '.join(lacking)}, required by {node.op_type}" if lacking else ""


def _count_text(minimum: int, maximum: int) -> str:
    """Return the allowed counts as text."""
    if maximum == VARIADIC_LIMIT:
        return f"{minimum} or more"
    return f"{minimum} to {maximum}" if maximum > minimum else f"{minimum}"
