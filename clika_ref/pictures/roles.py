"""The precision of each node: as planned, or as a runtime reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.explanation import Explanation, planned_precisions
from clika_ref.lora.adapters import BESIDE
from clika_ref.pictures.drawing import Role
from clika_ref.precisions import FLOAT, FUSED, INTEGERS
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization_scheme import QuantizationScheme, absorbs


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a node, with details for its box."""

    role: Role = Role.FLOAT
    badge: str = ""
    details: Mapping[str, str] = field(default_factory=dict[str, str])


def precisions(graph: Graph, plan: Plan | None, explanation: Explanation | None) -> dict[Node, Precision]:
    """Return the precision of each node. Without a plan, nodes are float and absent from the result.

    Args:
        graph: the quantized graph of the plan.
        plan: the quantization plan.
        explanation: a runtime's report on the graph.
    """
    found: dict[Node, Precision] = {}
    if plan is not None:
        planned = planned_precisions(graph, plan.scheme)
        for node in graph.nodes:
            found[node] = _as_planned(node, planned.get(node, FLOAT), plan)
        _join_absorbed(graph, plan.scheme, found)
    if explanation is not None:
        _take_word(graph, explanation, found)
    for node in graph.nodes:
        if node.kind in BESIDE.values():
            up = node.inputs[3]
            found[node] = Precision(Role.ADAPTER, f"rank {up.type.shape[1]}")
    return found


def _as_planned(node: Node, precision: str, plan: Plan) -> Precision:
    if precision == INTEGERS:
        return Precision(Role.INTEGERS, precision)
    if precision != FLOAT:
        return Precision(Role.WEIGHTS, precision)
    if node.name in plan.floats:
        return Precision(Role.KEPT, FLOAT, {"in float because": plan.floats[node.name]})
    return Precision(Role.FLOAT, FLOAT)


def _join_absorbed(graph: Graph, scheme: QuantizationScheme, found: dict[Node, Precision]) -> None:
    """Mark nodes that a runtime fuses into a quantized layer as INT8, too."""
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        layer = first.producer if isinstance(first, Value) else None
        if layer is None or layer.kind not in scheme.layers or not absorbs(scheme, node.kind, node.attrs):
            continue
        is_alone = all(use.user is node for use in layer.outputs[0].uses)
        if is_alone and found[layer].role is Role.INTEGERS and found[node].role is Role.FLOAT:
            found[node] = Precision(Role.INTEGERS, INTEGERS, {"computed": f"along with {layer.name}"})


def _take_word(graph: Graph, explanation: Explanation, found: dict[Node, Precision]) -> None:
    """Replace the planned precision of each node by the one that the runtime reports, if any."""
    facts = {fact.name: fact for fact in explanation.nodes}
    missed = {fact.name for fact in explanation.missed}
    for node in graph.nodes:
        fact = facts.get(node.name)
        if fact is None:
            continue
        before = found.get(node, Precision())
        details = dict(before.details) | {"planned": fact.planned, f"in {explanation.target}": fact.runs}
        if fact.reason:
            details["because"] = fact.reason
        if fact.name in missed:
            found[node] = Precision(Role.MISSED, fact.runs, details)
        elif fact.runs in (FLOAT, FUSED):
            found[node] = Precision(before.role, before.badge, details)
        else:
            role = Role.INTEGERS if fact.runs == INTEGERS else before.role
            found[node] = Precision(role, fact.runs, details)
