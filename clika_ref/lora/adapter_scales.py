"""Extend a quantization plan, made before adapters were attached, with scales for the outputs of adapters."""

from __future__ import annotations

from dataclasses import replace

from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import ADAPTER_OPERATORS, layer_of
from clika_ref.quantization.qdq.insertion import Plan


def add_adapter_scales(plan: Plan, graph: Graph) -> Plan:
    """Return a plan that gives the output of an adapter the scale of its layer's output.

    The layer's output keeps a scale if the target needs one to run such a layer quantized. The quantized weights and
    the names of layers do not change.

    Args:
        plan: the plan of the graph without adapters.
        graph: the graph lowered for the plan, with adapters.
    """
    activations, scaled_as = dict(plan.activations), dict(plan.scale_sources)
    for node in [node for node in graph.nodes if node.op_type in ADAPTER_OPERATORS.values()]:
        layer, result = layer_of(node), node.name
        if layer.name not in activations:
            continue
        activations[result] = activations[layer.name]
        for value, source in plan.scale_sources.items():
            if source == layer.name:
                scaled_as[value] = result
        if layer.name in scaled_as:
            scaled_as[result] = scaled_as[layer.name]
        if layer.op_type not in plan.scheme.closed:
            del activations[layer.name]
            scaled_as.pop(layer.name, None)
    return replace(plan, activations=activations, scale_sources=scaled_as)
