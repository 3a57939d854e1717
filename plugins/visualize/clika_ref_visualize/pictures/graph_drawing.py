"""Build a drawing from a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clika_ref.core.errors import format_count
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.export.explanation import Explanation
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref_visualize.pictures.drawing import Box, Edge, PictureDrawing, Role
from clika_ref_visualize.pictures.grouping import group_boxes
from clika_ref_visualize.pictures.node_texts import (
    MAX_INPUT_LINES,
    describe_constant,
    format_attributes,
    format_value,
    iterate_operands,
    shorten,
    wrap_attributes,
)
from clika_ref_visualize.pictures.read_values import collect_hidden_nodes, resolve_read_value
from clika_ref_visualize.pictures.roles import NodePrecision, determine_precisions


def build_drawing(
    graph: Graph, plan: Plan | None = None, explanation: Explanation | None = None, *, subtitle: str = ""
) -> PictureDrawing:
    """Return the drawing of a graph.

    Q/DQ pairs become colors: a quantized activation is a green edge, and a quantized weight is a row in the box of its
    layer.

    Args:
        graph: the graph to draw, after any stage.
        plan: the plan that the graph was quantized with, if any, for the precision of nodes and the reasons for float.
        explanation: a runtime's report on each node, which overrides the plan.
        subtitle: text to show after the number of nodes.
    """
    hidden = collect_hidden_nodes(graph)
    nodes = [node for node in graph.nodes if node not in hidden]
    precisions = determine_precisions(graph, plan, explanation)
    boxes: list[tuple[Box, Sequence[str]]] = [
        (_make_interface_box("input", value.name, value.name, value), ()) for value in graph.inputs
    ]
    keys: dict[Value, str] = {value: box.key for value, (box, _) in zip(graph.inputs, boxes, strict=True)}
    edges: list[Edge] = []
    for node in nodes:
        box = _make_node_box(node, precisions.get(node, NodePrecision()))
        boxes.append((box, node.origin.scopes))
        edges += _make_edges(box.key, [v for v in node.inputs if isinstance(v, Value)], keys)
        keys.update(dict.fromkeys(node.outputs, box.key))
    for box, value in _make_output_boxes(graph):
        boxes.append((box, ()))
        edges += _make_edges(box.key, [value], keys)
    count = format_count(len(nodes), "node")
    root = group_boxes(boxes, graph.name)
    return PictureDrawing(graph.name, ", ".join(part for part in (count, subtitle) if part), root, edges)


def _make_edges(target: str, values: Sequence[Value], keys: dict[Value, str]) -> Iterator[Edge]:
    """Yield the edges to a box: one for each value, and another one if the value is also read quantized."""
    seen: set[tuple[Value, str]] = set()
    for read in values:
        resolved = resolve_read_value(read)
        value, text = resolved.value, resolved.text
        if value in keys and (value, text) not in seen:
            seen.add((value, text))
            tensor = f"{value.name} {'quantized' if text else ''}".strip()
            yield Edge(keys[value], target, tensor, text or str(value.type), is_quantized=bool(text))


def _make_interface_box(kind: str, name: str, title: str, value: Value) -> Box:
    rows = [("name", shorten(title)), ("type", shorten(str(value.type)))]
    details = [("name", title), ("type", str(value.type))]
    return Box(f"{kind} {name}", kind, "", rows, details, Role.INTERFACE)


def _make_output_boxes(graph: Graph) -> Iterator[tuple[Box, Value]]:
    """Yield a box and a value for each output and for each buffer that a call updates."""
    outputs = [("output", str(index), value) for index, value in enumerate(graph.outputs)]
    outputs += [("state", name, value) for name, value in graph.state.items()]
    for kind, name, value in outputs:
        title = name if kind == "state" else resolve_read_value(value).value.name
        yield _make_interface_box(kind, name, title, value), value


def _make_node_box(node: Node, precision: NodePrecision) -> Box:
    scope = node.origin.scope
    rows = [("name", shorten(node.name)), *_list_operand_rows(node)]
    rows += [("out", shorten(str(value.type))) for value in node.outputs[:MAX_INPUT_LINES]]
    if len(node.outputs) > MAX_INPUT_LINES:
        rows.append(("", f"and {len(node.outputs) - MAX_INPUT_LINES} more outputs"))
    rows += [("", line) for line in wrap_attributes(node)]
    details = [("name", node.name), ("module", scope or "the model itself")]
    if node.origin.line:
        details.append(("line", node.origin.line))
    details += precision.details.items()
    details += [(name, _describe_operand(operand)) for name, operand in iterate_operands(node)]
    details += [("out", f"{value.name}: {value.type}") for value in node.outputs]
    details += [("attribute", text) for text in format_attributes(node)]
    if node.origin.history:
        details.append(("created by", ", ".join(node.origin.history)))
    return Box(f"node {node.name}", node.op_type, precision.badge, rows, details, precision.role)


def _list_operand_rows(node: Node) -> list[tuple[str, str]]:
    """Return rows for the operands of a node: activations as ``in``, then constants and numbers."""
    inputs: list[tuple[str, str]] = []
    constants: list[tuple[str, str]] = []
    for name, operand in iterate_operands(node):
        if not isinstance(operand, Value):
            constants.append((shorten(name, 13), shorten(format_value(operand))))
            continue
        resolved = resolve_read_value(operand)
        if resolved.value.is_constant:
            constants.append((shorten(name, 13), shorten(resolved.text or describe_constant(resolved.value, node))))
        else:
            inputs.append(("in", shorten(resolved.text.partition(", scale")[0] or str(operand.type))))
    return [*_truncate_rows(inputs, "inputs"), *_truncate_rows(constants, "operands")]


def _truncate_rows(rows: list[tuple[str, str]], noun: str) -> list[tuple[str, str]]:
    if len(rows) <= MAX_INPUT_LINES + 1:
        return rows
    return [*rows[:MAX_INPUT_LINES], ("", f"and {len(rows) - MAX_INPUT_LINES} more {noun}")]


def _describe_operand(operand: object) -> str:
    if not isinstance(operand, Value):
        return format_value(operand)
    resolved = resolve_read_value(operand)
    return f"{resolved.value.name}: {resolved.text or resolved.value.type}"
