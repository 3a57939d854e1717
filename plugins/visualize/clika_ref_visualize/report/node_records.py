"""Records of nodes: decision, runtime precision, cost, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping

from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION
from clika_ref.export.explanation import NOT_REPORTED, Explanation, NodeFacts, find_planned_precisions
from clika_ref.quantization.decision import LayerReport, Quantization
from clika_ref.quantization.qdq.insertion import QDQ_OPERATORS, Plan
from clika_ref_visualize.report.contents import NodeRecord, NodeState
from clika_ref_visualize.report.value_records import list_computing_nodes, trace_before_pairs

BITS_PER_BYTE = 8
"""Bits per byte."""


def build_node_records(
    graph: Graph,
    indices: Mapping[Value, int],
    *,
    scheme: QuantizationScheme | None,
    plan: Plan | None,
    quantization: Quantization | None,
    explanation: Explanation | None,
    seconds: Mapping[str, float],
) -> list[NodeRecord]:
    """Return a record for each node of a graph in order, except quantize and dequantize nodes.

    Args:
        graph: the lowered graph.
        indices: index of each value among all values.
        scheme: the quantization scheme of the target.
        plan: the quantization plan of the graph; None for a float one.
        quantization: the decision for each layer, if known.
        explanation: the precisions that the runtime reports, if known.
        seconds: the time of each node, as far as known.
    """
    planned = find_planned_precisions(graph, scheme, plan)
    facts = {fact.name: fact for fact in explanation.nodes} if explanation else {}
    layers = {layer.name: layer for layer in quantization.layers} if quantization else {}
    floats = plan.floats if plan else {}
    records: list[NodeRecord] = []
    for node in list_computing_nodes(graph):
        layer, fact = layers.get(node.name), facts.get(node.name)
        precision = fact.planned if fact else planned.get(node, FLOAT_PRECISION)
        before, after, bits = count_weight_bytes(node)
        if bits is not None and plan is not None and node.name in plan.weights:
            bits = plan.scheme.weights.bits, bits[1]  # 7 bits are stored in 8
        reason = _find_float_reason(node, layer, fact, plan)
        runs = None if fact is None else fact.runs
        inputs = dict.fromkeys(trace_before_pairs(v) for v in node.inputs if isinstance(v, Value))
        records.append(
            NodeRecord(
                node.name,
                node.origin.scope,
                layer.operator if layer else node.op_type,
                node.origin.line,
                find_state(precision, runs, is_kept=bool(reason) and (layer is not None or node.name in floats)),
                precision,
                runs,
                reason,
                fact.macs if fact else 0,
                layer.bits if layer else bits,
                layer.bytes_before if layer else before,
                layer.bytes_after if layer else after,
                layer.sensitivity if layer else None,
                seconds.get(node.name),
                [indices[value] for value in inputs if value in indices],
                [indices[value] for value in node.outputs],
            )
        )
    return records


def find_state(planned: str, runs: str | None, *, is_kept: bool) -> NodeState:
    """Return the state of a node, which selects its color.

    >>> find_state("int8", "int8", is_kept=False), find_state("int8", "float", is_kept=False)
    ('quantized', 'not_quantized')
    """
    if planned != FLOAT_PRECISION and runs in (FLOAT_PRECISION, NOT_REPORTED):
        return "not_quantized"
    if planned != FLOAT_PRECISION:
        return "quantized" if planned == INT8_PRECISION else "weight_only"
    if is_kept:
        return "kept_in_float"
    return "fused" if runs == FUSED_PRECISION else "float"


def _find_float_reason(node: Node, layer: LayerReport | None, fact: NodeFacts | None, plan: Plan | None) -> str:
    """Return why a node is float: the reason of the decision, or else the one that the runtime reports."""
    if layer is not None and layer.reason:
        return layer.reason
    if fact is not None and fact.reason:
        return fact.reason
    return plan.floats.get(node.name, "") if plan is not None else ""


def count_weight_bytes(node: Node) -> tuple[int, int, tuple[int, int] | None]:
    """Return the bytes of a layer's weight in float and as stored, and the bits of its weight and its input.

    Bias and scales, about a percent of that, are not counted.
    """
    if node.op.trait.weight is None and node.op.trait.matrices is None:
        return 0, 0, None
    before = after = 0
    narrowest = node.outputs[0].type.dtype.itemsize * BITS_PER_BYTE
    for value in _list_weights(node):
        constant = trace_before_pairs(value)
        if constant.is_constant:
            count, bits = constant.type.element_count, bits_per_element(constant, value.producer)
            before += count * value.type.dtype.itemsize
            after += count * bits // BITS_PER_BYTE
            narrowest = min(narrowest, bits)
    return before, after, (narrowest, _count_input_bits(node))


def _list_weights(node: Node) -> list[Value]:
    """Return the weight of a layer; for one with several, such as a recurrent layer, all operands of rank 2 or more."""
    position = node.op.trait.weight
    operands = node.inputs[1:] if position is None else node.inputs[position : position + 1]
    return [v for v in operands if isinstance(v, Value) and v.type.rank > 1]


def _count_input_bits(node: Node) -> int:
    """Return the bits per element of a layer's first input."""
    first = next((v for v in node.inputs if isinstance(v, Value)), None)
    if first is None:
        return 0
    is_quantized = trace_before_pairs(first) is not first and not trace_before_pairs(first).is_constant
    return BITS_PER_BYTE if is_quantized else first.type.dtype.itemsize * BITS_PER_BYTE


def bits_per_element(constant: Value, reader: Node | None) -> int:
    """Return the bits per element of a constant, as stored for its reader."""
    bits = reader.attrs.get("bits") if reader is not None and reader.op_type in QDQ_OPERATORS else None
    return bits or constant.type.dtype.itemsize * BITS_PER_BYTE


def count_constant_bytes(graph: Graph) -> tuple[int, int]:
    """Return the size in bytes of all used constants: in float without scales, and as stored.

    Args:
        graph: the lowered graph.
    """
    before = after = 0
    for value in graph.constants.values():
        uses = [use for use in value.uses if isinstance(use.user, Node)]
        if not uses:
            continue
        reader = uses[0].user
        assert isinstance(reader, Node)
        count = value.type.element_count
        after += count * bits_per_element(value, reader) // BITS_PER_BYTE
        if not all(map(_is_scale, uses)):
            before += count * (reader.output if reader.op_type in QDQ_OPERATORS else value).type.dtype.itemsize
    return before, after


def _is_scale(use: Use) -> bool:
    """Whether a constant is used as a scale or zero point."""
    return isinstance(use.user, Node) and use.user.op_type in QDQ_OPERATORS and use.position != 0
