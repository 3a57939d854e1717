"""What each node of a graph is computed in: as planned, or as a runtime says that it does."""

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
    """What a node is computed in, and what is to say of it."""

    role: Role = Role.FLOAT
    badge: str = ""
    details: Mapping[str, str] = field(default_factory=dict[str, str])


def precisions(graph: Graph, plan: Plan | None, explanation: Explanation | None) -> dict[Node, Precision]:
    """Return what each node is computed in; nodes of a graph without a plan are in float, and not mentioned.

    Args:
        graph: with the integers of the plan in it.
        plan: what was to become integers.
        explanation: what a runtime makes of it.
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
    """Say of nodes that a runtime computes along with a layer in integers that they are in integers, too."""
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        layer = first.producer if isinstance(first, Value) else None
        if layer is None or layer.kind not in scheme.layers or not absorbs(scheme, node.kind, node.attrs):
            continue
        is_alone = all(use.user is node for use in layer.outputs[0].uses)
        if is_alone and found[layer].role is Role.INTEGERS and found[node].role is Role.FLOAT:
            found[node] = Precision(Role.INTEGERS, INTEGERS, {"computed": f"along with {layer.name}"})


def _take_word(graph: Graph, explanation: Explanation, found: dict[Node, Precision]) -> None:
    """Say of each node what a runtime runs it in, where it tells."""
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
