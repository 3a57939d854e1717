"""Removal of units from the weights, types and attributes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clika_ref.core.errors import PassError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Node, Value
from clika_ref.core.types import TensorType
from clika_ref.pruning.attribute_search import find_attributes, select_indices
from clika_ref.pruning.channel_dims import find_channel_dims
from clika_ref.pruning.dependency_graph import DependencyGraph
from clika_ref.pruning.node_probes import NodeProbe, probe_node

KeptIndices = Mapping[int, Tensor]


def remove_units(found: DependencyGraph, gone: frozenset[int], sizes: Mapping[str, int]) -> list[Node]:
    """Remove units from a graph; return the nodes that prevent it.

    A node prevents the removal if no attributes give the same results without the units. Then nothing is changed.

    Args:
        found: the units of the graph.
        gone: the plain units to remove.
        sizes: values of the graph's symbols, for running nodes.

    Raises:
        PassError: a node returns other types than expected, because a dependency was missed.
    """
    graph = found.graph
    made = [v for node in graph.nodes for v in node.outputs]
    kept = {v: some for v in (*graph.constants.values(), *made) if (some := found.remaining_indices(v, gone))}
    shapes = {v: found.compute_shape(v, some) for v, some in kept.items()}
    attributes = {
        node: _new_attributes(found, node, gone, kept, sizes) for node in graph.nodes if _is_touched(node, kept)
    }
    attrs = {node: own for node, own in attributes.items() if own is not None}
    if len(attrs) < len(attributes):
        return [node for node in attributes if node not in attrs]
    for value, shape in shapes.items():
        value.type = TensorType(value.type.dtype, shape)
        if value.is_constant and value.data is not None:
            value.data = _shrink(value.data, kept[value])
    for node, found_attrs in attrs.items():
        node.attrs = found_attrs
        types = infer_types(node.op, node.inputs, node.attrs)
        if types != tuple(v.type for v in node.outputs):
            msg = f"{node!r} in {node.origin}: returns {', '.join(map(str, types))} after channels were removed"
            raise PassError(msg)
    graph.revision += 1
    return []


def _is_touched(node: Node, kept: Mapping[Value, KeptIndices]) -> bool:
    return any(v in kept for v in (*node.inputs, *node.outputs) if isinstance(v, Value))


def _new_attributes(
    found: DependencyGraph,
    node: Node,
    gone: frozenset[int],
    kept: Mapping[Value, KeptIndices],
    sizes: Mapping[str, int],
) -> dict[str, Any] | None:
    layer = find_channel_dims(node)
    if layer is not None and found.units_of(layer.weight):
        if layer.groups == 1 or layer.x not in kept:
            return node.attrs
        groups = layer.groups * len(kept[layer.x][layer.channel]) // len(found.units_of(layer.x)[layer.channel])
        return {**node.attrs, "groups": groups}
    asked = probe_node(node, sizes)
    return find_attributes(asked, found, gone) if isinstance(asked, NodeProbe) else None


def _shrink(data: Tensor, kept: KeptIndices) -> Tensor:
    short = select_indices(data.detach(), kept).contiguous(memory_format=_memory_format(data))
    return nn.Parameter(short, data.requires_grad) if isinstance(data, nn.Parameter) else short


def _memory_format(data: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: channels last if the user chose it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.ndim, torch.contiguous_format)
    is_last = not data.is_contiguous() and data.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format
