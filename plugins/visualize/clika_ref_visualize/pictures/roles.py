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
    precisions: dict[Node, NodePrecision] = {}
    if plan is not None:
        planned = find_planned_precisions(graph, plan.scheme, plan)
        for node in graph.nodes:
            precisions[node] = _find_planned_precision(node, planned.get(node, FLOAT_PRECISION), plan)
        _mark_fused_nodes(graph, plan.scheme, precisions)
    if explanation is not None:
        _apply_explanation(graph, explanation, precisions)
    for node in graph.nodes:
        if node.op_type in ADAPTER_OPERATORS.values():
            up = node.inputs[3]
            precisions[node] = NodePrecision(Role.ADAPTER, f"rank {up.type.shape[1]}")
    return precisions


def _find_planned_precision(node: Node, precision: str, plan: Plan) -> NodePrecision:
    if precision == INT8_PRECISION:
        return NodePrecision(Role.QUANTIZED, precision)
    if precision != FLOAT_PRECISION:
        return NodePrecision(Role.WEIGHT_ONLY, precision)
    if node.name in plan.floats:
        return NodePrecision(Role.KEPT_IN_FLOAT, FLOAT_PRECISION, {"reason for float": plan.floats[node.name]})
    return NodePrecision(Role.FLOAT, FLOAT_PRECISION)


def _mark_fused_nodes(graph: Graph, scheme: QuantizationScheme, precisions: dict[Node, NodePrecision]) -> None:
    """Mark nodes that a runtime fuses into a quantized layer as INT8, too."""
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        layer = first.producer if isinstance(first, Value) else None
        if layer is None or layer.op_type not in scheme.layers or not is_fused(scheme, node.op_type, node.attrs):
            continue
        is_alone = all(use.user is node for use in layer.outputs[0].uses)
        if is_alone and precisions[layer].role is Role.QUANTIZED and precisions[node].role is Role.FLOAT:
            precisions[node] = NodePrecision(Role.QUANTIZED, INT8_PRECISION, {"fused into": layer.name})


def _apply_explanation(graph: Graph, explanation: Explanation, precisions: dict[Node, NodePrecision]) -> None:
    """Replace the planned precision of each node by the one that the runtime reports, if any."""
    facts = {fact.name: fact for fact in explanation.nodes}
    not_quantized = {fact.name for fact in explanation.not_quantized}
    for node in graph.nodes:
        fact = facts.get(node.name)
        if fact is None:
            continue
        before = precisions.get(node, NodePrecision())
        details = dict(before.details) | {"planned": fact.planned, f"precision in {explanation.target}": fact.runs}
        if fact.reason:
            details["reason"] = fact.reason
        if fact.name in not_quantized:
            precisions[node] = NodePrecision(Role.NOT_QUANTIZED, fact.runs, details)
        elif fact.runs in (FLOAT_PRECISION, FUSED_PRECISION):
            precisions[node] = NodePrecision(before.role, before.badge, details)
        else:
            role = Role.QUANTIZED if fact.runs == INT8_PRECISION else before.role
            precisions[node] = NodePrecision(role, fact.runs, details)
