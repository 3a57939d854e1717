"""Merge adapters into the weights permanently."""

from __future__ import annotations

import torch

from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import Adapter, adapters_of, merge_arguments, merge_weight
from clika_ref.quantization.qdq.layer_weights import data_of


@torch.no_grad()
def merge_adapters(graph: Graph, *, is_quantized: bool) -> None:
    """Merge the adapters of a graph into its weights, and remove them.

    Args:
        graph: the graph of a module; it and its weights are changed in place.
        is_quantized: whether the weights are quantized.

    Raises:
        ModelError: the weight of an adapter is quantized, masked, or read by other nodes.
    """
    found = adapters_of(graph)
    reasons = {adapter.path: _explain_problem(adapter, is_quantized=is_quantized) for adapter in found}
    problems = [f"  {path}: {reason}" for path, reason in reasons.items() if reason]
    if problems:
        shown = "\n".join(problems)
        raise ModelError(f"cannot merge {format_count(len(problems), 'adapter')} of {graph.name}:\n{shown}")
    for adapter in found:
        weight, down, up = map(data_of, (adapter.weight, adapter.down, adapter.up))
        weight.copy_(merge_weight(weight, down, up, **merge_arguments(adapter, adapter.layers[0])))
        for node in adapter.nodes:
            graph.replace(node.output, node.inputs[0])
            graph.erase(node)
        for matrix in (adapter.down, adapter.up):
            graph.remove_constant(matrix.name)  # later adapters can reuse the name


def _explain_problem(adapter: Adapter, *, is_quantized: bool) -> str:
    """Return why an adapter cannot be merged; empty if it can."""
    if is_quantized and adapter.attributes["merging"] != "on":
        return (
            "its layer is quantized, and merging would change the quantized weight. Merge it before you quantize, or "
            "attach it with LoraSettings(merging='on')"
        )
    if adapter.is_masked:
        return "its weight is masked, and merging would overwrite the mask. Exports keep the adapter unmerged"
    others = [use.user for use in adapter.weight.uses if use.user not in adapter.layers]
    if others:
        return f"its weight is tied, and also read by {others[0]!r}. Exports merge it for this layer only"
    return ""
