"""The precision of each node: as planned, or as a runtime reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme, is_fused
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION
from clika_ref.export.explanation import Explanation, find_planned_precisions
from clika_ref.lora.adapters import ADAPTER_OPERATORS
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref_visualize.pictures.drawing import Role


@dataclass(frozen=True, slots=True)
class NodePrecision:
    """The precision of a node, with details for its box."""

    role: Role = Role.FLOAT
    badge: str = ""
    details: Mapping[str, str] = field(default_factory=dict[str, str])


def determine_precisions(graph: Graph, plan: Plan | None, explanation: Explanation | None) -> dict[Node, NodePrecision]:
    """Return the precision of each node. Without a plan, nodes are float and absent from the result.

    Args:
        graph: the quantized graph of the plan.
        plan: the quantization plan.
        explanation: a runtime's report on the graph.
    """
    found: dict[Node, NodePrecision] = {}
    if plan is not None:
        planned = find_planned_precisions(graph, plan.scheme)
        for node in graph.nodes:
            found[node] = _find_planned_precision(node, planned.get(node, FLOAT_PRECISION), plan)
        _mark_fused_nodes(graph, plan.scheme, found)
    if explanation is not None:
        _apply_explanation(graph, explanation, found)
    for node in graph.nodes:
        if node.op_type in ADAPTER_OPERATORS.values():
            up = node.inputs[3]
            found[node] = NodePrecision(Role.ADAPTER, f"rank {up.type.shape[1]}")
    return found


def _find_planned_precision(node: Node, precision: str, plan: Plan) -> NodePrecision:
    if precision == INT8_PRECISION:
        return NodePrecision(Role.INTEGERS, precision)
    if precision != FLOAT_PRECISION:
        return NodePrecision(Role.WEIGHTS, precision)
    if node.name in plan.floats:
        return NodePrecision(Role.KEPT, FLOAT_PRECISION, {"in float because": plan.floats[node.name]})
    return NodePrecision(Role.FLOAT, FLOAT_PRECISION)


def _mark_fused_nodes(graph: Graph, scheme: QuantizationScheme, found: dict[Node, NodePrecision]) -> None:
    """Mark nodes that a runtime fuses into a quantized layer as INT8, too."""
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        layer = first.producer if isinstance(first, Value) else None
        if layer is None or layer.op_type not in scheme.layers or not is_fused(scheme, node.op_type, node.attrs):
            continue
        is_alone = all(use.user is node for use in layer.outputs[0].uses)
        if is_alone and found[layer].role is Role.INTEGERS and found[node].role is Role.FLOAT:
            found[node] = NodePrecision(Role.INTEGERS, INT8_PRECISION, {"computed": f"along with {layer.name}"})


def _apply_explanation(graph: Graph, explanation: Explanation, found: dict[Node, NodePrecision]) -> None:
    """Replace the planned precision of each node by the one that the runtime reports, if any."""
    facts = {fact.name: fact for fact in explanation.nodes}
    missed = {fact.name for fact in explanation.not_quantized}
    for node in graph.nodes:
        fact = facts.get(node.name)
        if fact is None:
            continue
        before = found.get(node, NodePrecision())
        details = dict(before.details) | {"planned": fact.planned, f"in {explanation.target}": fact.runs}
        if fact.reason:
            details["because"] = fact.reason
        if fact.name in missed:
            found[node] = NodePrecision(Role.MISSED, fact.runs, details)
        elif fact.runs in (FLOAT_PRECISION, FUSED_PRECISION):
            found[node] = NodePrecision(before.role, before.badge, details)
        else:
            role = Role.INTEGERS if fact.runs == INT8_PRECISION else before.role
            found[node] = NodePrecision(role, fact.runs, details)
