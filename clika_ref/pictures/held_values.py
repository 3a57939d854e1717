"""Values read through pairs of ``quantize`` and ``dequantize``, with their quantization."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pictures.node_texts import value_text

TO_INTEGERS, TO_FLOATS = "quantize", "dequantize"


@dataclass(frozen=True, slots=True)
class Held:
    """A value that a node reads, with its quantization. A constant may be stored as integers."""

    value: Value
    text: str = ""
    """The integer type and scale; empty if the value is not quantized."""


def is_folded(node: Node) -> bool:
    """Whether a node is half of a ``quantize``/``dequantize`` pair, which pictures show as a color."""
    if node.kind == TO_FLOATS:
        source = node.inputs[0]
        return source.is_constant or (source.producer is not None and is_folded(source.producer))
    return node.kind == TO_INTEGERS and all(
        isinstance(use.user, Node) and use.user.kind == TO_FLOATS and use.position == 0 for use in node.output.uses
    )


def held(value: Value) -> Held:
    """Return the value before a ``quantize``/``dequantize`` pair, with its quantization."""
    made = value.producer
    if made is None or made.kind != TO_FLOATS or not is_folded(made):
        return Held(value)
    integers: Value = made.inputs[0]
    if integers.producer is None:
        return Held(integers, _of_constant(made, integers))
    rounds = integers.producer
    source: Value = rounds.inputs[0]
    return Held(source, f"{integers.type}, {_scale(rounds)}")


def _of_constant(made: Node, integers: Value) -> str:
    bits, block = made.attrs["bits"], made.attrs["block_size"]
    dtype = str(integers.type)
    named = f"int{bits}{dtype[dtype.index('[') :]}" if bits < 8 else dtype
    if block:
        return f"{named} in blocks of {block}"
    return f"{named} {_scale(made)}"


def _scale(node: Node) -> str:
    """Return the scale of a pair: ``scale 0.0123, zero point 3``, or ``per channel``."""
    if node.attrs["axis"] is not None:
        return "per channel"
    scale, *rest = (_number(operand) for operand in node.inputs[1:])
    zero = f", zero point {rest[0]}" if rest and rest[0] not in ("", "0") else ""
    return f"scale {scale}{zero}" if scale else "one scale"


def _number(operand: object) -> str:
    if operand is None:
        return ""
    if not isinstance(operand, Value):
        return value_text(operand)
    data = operand.data
    return value_text(data.item()) if data is not None and data.numel() == 1 else ""


def folded_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that pictures do not draw."""
    return {node for node in graph.nodes if node.kind in (TO_INTEGERS, TO_FLOATS) and is_folded(node)}
