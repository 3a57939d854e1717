"""Adapters merged into the weights for good, after which nothing is left of them."""

from __future__ import annotations

import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import Adapter, adapters_of, arguments_of_merging, merged_weight


@torch.no_grad()
def merge_adapters(graph: Graph, *, is_quantized: bool) -> None:
    """Write what adapters add into the weights of a graph, and take them out of it.

    Args:
        graph: of a module, changed in place, as its weights are.
        is_quantized: whether weights become integers.

    Raises:
        ModelError: an adapter stands beside integers, beside a masked weight, or beside one that something else reads.
    """
    found = adapters_of(graph)
    problems = [
        f"  {adapter.path}: {problem}" for adapter in found if (problem := _problem(adapter, is_quantized=is_quantized))
    ]
    if problems:
        shown = "\n".join(problems)
        msg = f"{len(problems)} adapters of {graph.name} cannot be merged:\n{shown}"
        raise ModelError(msg)
    for adapter in found:
        weight, down, up = (value.data for value in (adapter.weight, adapter.down, adapter.up))
        assert weight is not None
        assert down is not None
        assert up is not None
        weight.copy_(merged_weight(weight, down, up, **arguments_of_merging(adapter, adapter.layers[0])))
        for node in adapter.nodes:
            graph.replace(node.output, node.inputs[0])
            graph.erase(node)
        for matrix in (adapter.down, adapter.up):
            del graph.constants[matrix.name]
            graph._names.pop(matrix.name)  # adapters that are attached later bear it


def _problem(adapter: Adapter, *, is_quantized: bool) -> str:
    """Say why an adapter cannot be merged; nothing where it can."""
    if is_quantized and adapter.attributes["merging"] != "on":
        return (
            "it stands beside integers, which would be others then; merge it before the module is quantized, or "
            "attach it with LoraSettings(merging='on')"
        )
    if adapter.is_masked:
        return "its weight is masked, and would be no longer; exports leave it beside the layer"
    others = [use.user for use in adapter.weight.uses if use.user not in adapter.layers]
    if others:
        return f"its weight is tied, and read by {others[0]!r} as well; exports merge it for the layer alone"
    return ""
