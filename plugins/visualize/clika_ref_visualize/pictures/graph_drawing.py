"""Build a drawing from a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.export.explanation import Explanation
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref_visualize.pictures.drawing import Box, Edge, PictureDrawing, Role
from clika_ref_visualize.pictures.grouping import group_boxes
from clika_ref_visualize.pictures.node_texts import (
    MAX_INPUT_LINES,
    attribute_lines,
    attribute_texts,
    constant_text,
    operand_names,
    shorten,
    value_text,
)
from clika_ref_visualize.pictures.read_values import collect_hidden_nodes, resolve_read_value
from clika_ref_visualize.pictures.roles import NodePrecision, determine_precisions


def build_drawing(
    graph: Graph, plan: Plan | None = None, explanation: Explanation | None = None, *, subtitle: str = ""
) -> PictureDrawing:
    """Return the drawing of a graph.

    Pairs of ``quantize`` and ``dequantize`` become colors: a value between them is a quantized edge, and a quantized
    weight is a line in the box of its layer.

    Args:
        graph: graph after any stage.
        plan: the plan that the graph was quantized with, if any, for the precision of nodes and the reasons for float.
        explanation: a runtime's report on each node, shown in place of the plan.
        subtitle: text to show after the number of nodes.
    """
    folded = collect_hidden_nodes(graph)
    nodes = [node for node in graph.nodes if node not in folded]
    known = determine_precisions(graph, plan, explanation)
    boxes: list[tuple[Box, Sequence[str]]] = [(_input_box(value), ()) for value in graph.inputs]
    keys: dict[Value, str] = {value: box.key for value, (box, _) in zip(graph.inputs, boxes, strict=True)}
    edges: list[Edge] = []
    for node in nodes:
        box = _node_box(node, known.get(node, NodePrecision()))
        boxes.append((box, node.origin.scopes))
        edges += _edges(box.key, [v for v in node.inputs if isinstance(v, Value)], keys)
        keys.update(dict.fromkeys(node.outputs, box.key))
    for box, value in _output_boxes(graph):
        boxes.append((box, ()))
        edges += _edges(box.key, [value], keys)
    count = f"{len(nodes):,} nodes" if len(nodes) != 1 else "1 node"
    root = group_boxes(boxes, graph.name)
    return PictureDrawing(graph.name, ", ".join(part for part in (count, subtitle) if part), root, edges)


def _edges(target: str, values: Sequence[Value], keys: dict[Value, str]) -> Iterator[Edge]:
    """Yield the edges to a box: one per value, and another one if the value is also read quantized."""
    seen: set[tuple[Value, str]] = set()
    for read in values:
        found = resolve_read_value(read)
        value, text = found.value, found.text
        if value in keys and (value, text) not in seen:
            seen.add((value, text))
            carries = f"{value.name} {'integers' if text else ''}".strip()
            yield Edge(keys[value], target, carries, text or str(value.type), is_integers=bool(text))


def _input_box(value: Value) -> Box:
    rows = [("name", shorten(value.name)), ("type", shorten(str(value.type)))]
    return Box(
        f"input {value.name}", "input", "", rows, [("name", value.name), ("type", str(value.type))], Role.INTERFACE
    )


def _output_boxes(graph: Graph) -> Iterator[tuple[Box, Value]]:
    """Yield a box and a value for each output and for each buffer that a call updates."""
    found = [("output", str(index), value) for index, value in enumerate(graph.outputs)]
    found += [("state", name, value) for name, value in graph.state.items()]
    for kind, name, value in found:
        read = resolve_read_value(value)
        title = name if kind == "state" else read.value.name
        rows = [("name", shorten(title)), ("type", shorten(str(value.type)))]
        details = [("name", title), ("type", str(value.type))]
        yield Box(f"{kind} {name}", kind, "", rows, details, Role.INTERFACE), value


def _node_box(node: Node, precision: NodePrecision) -> Box:
    scope = node.origin.scope
    rows = [("name", shorten(node.name)), *_operand_rows(node)]
    rows += [("out", shorten(str(value.type))) for value in node.outputs[:MAX_INPUT_LINES]]
    if len(node.outputs) > MAX_INPUT_LINES:
        rows.append(("", f"and {len(node.outputs) - MAX_INPUT_LINES} more outputs"))
    rows += [("", line) for line in attribute_lines(node)]
    details = [("name", node.name), ("module", scope or "the model itself")]
    if node.origin.line:
        details.append(("line", node.origin.line))
    details += precision.details.items()
    details += [(name, _operand_text(operand)) for name, operand in operand_names(node)]
    details += [("out", f"{value.name}: {value.type}") for value in node.outputs]
    details += [("with", text) for text in attribute_texts(node)]
    if node.origin.history:
        details.append(("made by", ", ".join(node.origin.history)))
    return Box(f"node {node.name}", node.op_type, precision.badge, rows, details, precision.role)


def _operand_rows(node: Node) -> list[tuple[str, str]]:
    """Return rows for the operands of a node: activations as ``in``, then constants and numbers."""
    made: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    for name, operand in operand_names(node):
        if not isinstance(operand, Value):
            kept.append((shorten(name, 13), shorten(value_text(operand))))
            continue
        found = resolve_read_value(operand)
        if found.value.is_constant:
            kept.append((shorten(name, 13), shorten(found.text or constant_text(found.value, node))))
        else:
            made.append(("in", shorten(found.text.partition(", scale")[0] or str(operand.type))))
    return [*_truncate_rows(made, "inputs"), *_truncate_rows(kept, "operands")]


def _truncate_rows(rows: list[tuple[str, str]], what: str) -> list[tuple[str, str]]:
    if len(rows) <= MAX_INPUT_LINES + 1:
        return rows
    return [*rows[:MAX_INPUT_LINES], ("", f"and {len(rows) - MAX_INPUT_LINES} more {what}")]


def _operand_text(operand: object) -> str:
    if not isinstance(operand, Value):
        return value_text(operand)
    found = resolve_read_value(operand)
    return f"{found.value.name}: {found.text or found.value.type}"
