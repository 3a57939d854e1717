"""Values read through Q/DQ pairs, with their quantization."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.core.ir import Graph, Node, Value
from clika_ref_visualize.pictures.node_texts import format_value

QUANTIZE_OPERATOR, DEQUANTIZE_OPERATOR = "quantize", "dequantize"


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A value that a node reads, with its quantization. A constant may be stored quantized."""

    value: Value
    text: str = ""
    """Quantized type and scale; empty if the value is not quantized."""


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
    dequantize = value.producer
    if dequantize is None or dequantize.op_type != DEQUANTIZE_OPERATOR or not is_half_of_pair(dequantize):
        return ReadValue(value)
    quantized: Value = dequantize.inputs[0]
    if quantized.producer is None:
        return ReadValue(quantized, _describe_quantized_constant(dequantize, quantized))
    quantize = quantized.producer
    source: Value = quantize.inputs[0]
    return ReadValue(source, f"{quantized.type}, {_describe_scale(quantize)}")


def _describe_quantized_constant(dequantize: Node, quantized: Value) -> str:
    bits, block = dequantize.attrs["bits"], dequantize.attrs["block_size"]
    dtype = str(quantized.type)
    text = f"int{bits}{dtype[dtype.index('[') :]}" if bits < 8 else dtype
    if block:
        return f"{text} in blocks of {block}"
    return f"{text} {_describe_scale(dequantize)}"


def _describe_scale(node: Node) -> str:
    """Return the scale of a Q/DQ pair: ``scale 0.0123, zero point 3``, or ``per channel``."""
    if node.attrs["axis"] is not None:
        return "per channel"
    scale, *rest = (_format_number(operand) for operand in node.inputs[1:])
    zero = f", zero point {rest[0]}" if rest and rest[0] not in ("", "0") else ""
    return f"scale {scale}{zero}" if scale else "one scale"


def _format_number(operand: object) -> str:
    if operand is None:
        return ""
    if not isinstance(operand, Value):
        return format_value(operand)
    data = operand.data
    return format_value(data.item()) if data is not None and data.numel() == 1 else ""


def collect_hidden_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that pictures do not draw."""
    return {
        node
        for node in graph.nodes
        if node.op_type in (QUANTIZE_OPERATOR, DEQUANTIZE_OPERATOR) and is_half_of_pair(node)
    }
