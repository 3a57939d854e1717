"""Values read through pairs of ``quantize`` and ``dequantize``, with their quantization."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.core.ir import Graph, Node, Value
from clika_ref_visualize.pictures.node_texts import value_text

QUANTIZE_OPERATOR, DEQUANTIZE_OPERATOR = "quantize", "dequantize"


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A value that a node reads, with its quantization. A constant may be stored as integers."""

    value: Value
    text: str = ""
    """The integer type and scale; empty if the value is not quantized."""


def is_half_of_pair(node: Node) -> bool:
    """Whether a node is half of a ``quantize``/``dequantize`` pair, which pictures show as a color."""
    if node.op_type == DEQUANTIZE_OPERATOR:
        source = node.inputs[0]
        return source.is_constant or (source.producer is not None and is_half_of_pair(source.producer))
    return node.op_type == QUANTIZE_OPERATOR and all(
        isinstance(use.user, Node) and use.user.op_type == DEQUANTIZE_OPERATOR and use.position == 0
        for use in node.output.uses
    )


def resolve_read_value(value: Value) -> ReadValue:
    """Return the value before a ``quantize``/``dequantize`` pair, with its quantization."""
    made = value.producer
    if made is None or made.op_type != DEQUANTIZE_OPERATOR or not is_half_of_pair(made):
        return ReadValue(value)
    integers: Value = made.inputs[0]
    if integers.producer is None:
        return ReadValue(integers, _constant_text(made, integers))
    rounds = integers.producer
    source: Value = rounds.inputs[0]
    return ReadValue(source, f"{integers.type}, {_scale_text(rounds)}")


def _constant_text(made: Node, integers: Value) -> str:
    bits, block = made.attrs["bits"], made.attrs["block_size"]
    dtype = str(integers.type)
    named = f"int{bits}{dtype[dtype.index('[') :]}" if bits < 8 else dtype
    if block:
        return f"{named} in blocks of {block}"
    return f"{named} {_scale_text(made)}"


def _scale_text(node: Node) -> str:
    """Return the scale of a pair: ``scale 0.0123, zero point 3``, or ``per channel``."""
    if node.attrs["axis"] is not None:
        return "per channel"
    scale, *rest = (_number_text(operand) for operand in node.inputs[1:])
    zero = f", zero point {rest[0]}" if rest and rest[0] not in ("", "0") else ""
    return f"scale {scale}{zero}" if scale else "one scale"


def _number_text(operand: object) -> str:
    if operand is None:
        return ""
    if not isinstance(operand, Value):
        return value_text(operand)
    data = operand.data
    return value_text(data.item()) if data is not None and data.numel() == 1 else ""


def collect_hidden_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that pictures do not draw."""
    return {
        node
        for node in graph.nodes
        if node.op_type in (QUANTIZE_OPERATOR, DEQUANTIZE_OPERATOR) and is_half_of_pair(node)
    }
