"""Records of nodes: decision, runtime precision, cost, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION
from clika_ref.export.explanation import NOT_REPORTED, Explanation, NodeFacts, find_planned_precisions
from clika_ref.quantization.decision import LayerReport, Quantization
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref_visualize.report.contents import NodeRecord, NodeState
from clika_ref_visualize.report.file_bytes import BITS_PER_BYTE, bits_per_element
from clika_ref_visualize.report.value_records import list_computing_nodes, trace_before_pairs


@dataclass(frozen=True)
class KnownFacts:
    """Known facts about the nodes of a graph; unknown ones are empty."""

    scheme: QuantizationScheme | None
    """Scheme of the target, as configured."""
    plan: Plan | None = None
    found: Quantization | None = None
    explanation: Explanation | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


def node_records(graph: Graph, told: KnownFacts, places: Mapping[Value, int]) -> list[NodeRecord]:
    """Return a record for each node of a graph in order, except quantize and dequantize nodes.

    Args:
        graph: the lowered graph.
        told: known facts about its nodes.
        places: index of each value among all values.
    """
    planned = find_planned_precisions(graph, told.scheme)
    facts = {fact.name: fact for fact in told.explanation.nodes} if told.explanation else {}
    layers = {layer.name: layer for layer in told.found.layers} if told.found else {}
    floats = told.plan.floats if told.plan else {}
    found: list[NodeRecord] = []
    for node in list_computing_nodes(graph):
        layer, fact = layers.get(node.name), facts.get(node.name)
        wanted = fact.planned if fact else planned.get(node, FLOAT_PRECISION)
        before, after, bits = weight_bytes(node)
        reason = _float_reason(node, layer, fact, told.plan)
        runs = None if fact is None else fact.runs
        reads = dict.fromkeys(trace_before_pairs(v) for v in node.inputs if isinstance(v, Value))
        found.append(
            NodeRecord(
                node.name,
                node.origin.scope,
                layer.operator if layer else node.op_type,
                node.origin.line,
                state_of(wanted, runs, is_kept=bool(reason) and (layer is not None or node.name in floats)),
                wanted,
                runs,
                reason,
                fact.macs if fact else 0,
                layer.bits if layer else bits,
                layer.bytes_before if layer else before,
                layer.bytes_after if layer else after,
                layer.sensitivity if layer else None,
                told.seconds.get(node.name),
                [places[value] for value in reads if value in places],
                [places[value] for value in node.outputs],
            )
        )
    return found


def state_of(planned: str, runs: str | None, *, is_kept: bool) -> NodeState:
    """Return the state of a node, which selects its color.

    >>> state_of("int8", "int8", is_kept=False), state_of("int8", "float", is_kept=False)
    ('integers', 'missed')
    """
    if planned != FLOAT_PRECISION and runs in (FLOAT_PRECISION, NOT_REPORTED):
        return "missed"
    if planned != FLOAT_PRECISION:
        return "integers" if planned == INT8_PRECISION else "weights"
    if is_kept:
        return "kept"
    return "fused" if runs == FUSED_PRECISION else "float"


def _float_reason(node: Node, layer: LayerReport | None, fact: NodeFacts | None, plan: Plan | None) -> str:
    """Return why a node is float: the reason of the decision, or else the one that the runtime reports."""
    if layer is not None and layer.reason:
        return layer.reason
    if fact is not None and fact.reason:
        return fact.reason
    return plan.floats.get(node.name, "") if plan is not None else ""


def weight_bytes(node: Node) -> tuple[int, int, tuple[int, int] | None]:
    """Return the bytes of a layer's weight in float and as stored, and the bits of its weight and its input.

    Bias and scales, about a percent of that, are not counted.
    """
    if node.op.trait.weight is None and node.op.trait.matrices is None:
        return 0, 0, None
    before = after = 0
    narrowest = node.outputs[0].type.dtype.itemsize * BITS_PER_BYTE
    for value in _weights(node):
        held = trace_before_pairs(value)
        if held.is_constant:
            count, bits = held.type.element_count, bits_per_element(held, value.producer)
            before += count * value.type.dtype.itemsize
            after += count * bits // BITS_PER_BYTE
            narrowest = min(narrowest, bits)
    return before, after, (narrowest, _input_bits(node))


def _weights(node: Node) -> list[Value]:
    """Return the weight of a layer; for one with several, such as a recurrent layer, all operands of rank 2 or more."""
    position = node.op.trait.weight
    operands = node.inputs[1:] if position is None else node.inputs[position : position + 1]
    return [v for v in operands if isinstance(v, Value) and v.type.rank > 1]


def _input_bits(node: Node) -> int:
    """Return the bits per element of a layer's first input."""
    read = next((v for v in node.inputs if isinstance(v, Value)), None)
    if read is None:
        return 0
    is_integer = trace_before_pairs(read) is not read and not trace_before_pairs(read).is_constant
    return BITS_PER_BYTE if is_integer else read.type.dtype.itemsize * BITS_PER_BYTE
