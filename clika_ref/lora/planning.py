"""A plan for integers that was made before there were adapters, with scales for what these return."""

from __future__ import annotations

from dataclasses import replace

from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import BESIDE, layer_beside
from clika_ref.quantization.quantizing import Plan


def plan_beside(plan: Plan, graph: Graph) -> Plan:
    """Return a plan in which what an adapter returns has the scale that the result of its layer had.

    That result keeps a scale where the target computes such a layer in integers only with one. All else is as it was:
    the integers of weights, and the names of layers.

    Args:
        plan: of the graph without adapters.
        graph: as it is lowered for the plan, with adapters beside layers.
    """
    activations, scaled_as = dict(plan.activations), dict(plan.scaled_as)
    for node in [node for node in graph.nodes if node.kind in BESIDE.values()]:
        layer, result = layer_beside(node), node.name
        if layer.name not in activations:
            continue
        activations[result] = activations[layer.name]
        for value, source in plan.scaled_as.items():
            if source == layer.name:
                scaled_as[value] = result
        if layer.name in scaled_as:
            scaled_as[result] = scaled_as[layer.name]
        if layer.kind not in plan.scheme.closed:
            del activations[layer.name]
            scaled_as.pop(layer.name, None)
    return replace(plan, activations=activations, scaled_as=scaled_as)
