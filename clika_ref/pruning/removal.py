"""Remove units, which are indices that can only be removed together, from the weights of a graph."""

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
"""The remaining indices along each dim that loses some, by axis."""


def remove_units(dependencies: DependencyGraph, removed: frozenset[int], sizes: Mapping[str, int]) -> list[Node]:
    """Remove units from the weights, types and attributes of a graph; return the nodes that prevent it.

    A node prevents the removal if no attributes give the same results without the units. The graph is then unchanged.

    Args:
        dependencies: the units of the graph.
        removed: the units to remove, none of them a crossing of others.
        sizes: values of the graph's symbols, for running nodes.

    Raises:
        PassError: a node returns other types than expected, because a dependency is unknown.
    """
    graph = dependencies.graph
    values = [*graph.constants.values(), *(v for node in graph.nodes for v in node.outputs)]
    kept = {v: indices for v in values if (indices := dependencies.remaining_indices(v, removed))}
    new_attrs: dict[Node, dict[str, Any]] = {}
    preventing: list[Node] = []
    for node in graph.nodes:
        if any(v in kept for v in (*node.inputs, *node.outputs) if isinstance(v, Value)):
            attrs = _find_new_attributes(dependencies, node, removed, kept, sizes)
            if attrs is None:
                preventing.append(node)
            else:
                new_attrs[node] = attrs
    if preventing:
        return preventing
    new_types = {v: TensorType(v.type.dtype, dependencies.compute_shape(v, indices)) for v, indices in kept.items()}
    for value, new_type in new_types.items():
        value.type = new_type
        if value.is_constant and value.data is not None:
            value.data = _shrink(value.data, kept[value])
    for node, attrs in new_attrs.items():
        node.attrs = attrs
        _check_types(node)
    graph.revision += 1
    return []


def _find_new_attributes(
    dependencies: DependencyGraph,
    node: Node,
    removed: frozenset[int],
    kept: Mapping[Value, KeptIndices],
    sizes: Mapping[str, int],
) -> dict[str, Any] | None:
    """Return the attributes of a node after the removal, or None if none give the same results."""
    layer = find_channel_dims(node)
    if layer is not None and dependencies.units_of(layer.weight):
        if layer.groups == 1 or layer.x not in kept:
            return node.attrs
        channels = dependencies.units_of(layer.x)[layer.channel]
        groups = layer.groups * len(kept[layer.x][layer.channel]) // len(channels)
        return {**node.attrs, "groups": groups}
    probe = probe_node(node, sizes)
    return find_attributes(probe, dependencies, removed) if isinstance(probe, NodeProbe) else None


def _shrink(data: Tensor, kept: KeptIndices) -> Tensor:
    """Return a weight with only the kept indices, as a parameter if it was one."""
    shrunk = select_indices(data.detach(), kept).contiguous(memory_format=_memory_format(data))
    return nn.Parameter(shrunk, data.requires_grad) if isinstance(data, nn.Parameter) else shrunk


def _memory_format(data: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: channels last if the user chose it."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.ndim, torch.contiguous_format)
    is_channels_last = not data.is_contiguous() and data.is_contiguous(memory_format=channels_last)
    return channels_last if is_channels_last else torch.contiguous_format


def _check_types(node: Node) -> None:
    """Compare the types that a node returns with the expected ones."""
    types = infer_types(node.op, node.inputs, node.attrs)
    if types != tuple(v.type for v in node.outputs):
        raise PassError(f"{node!r} in {node.origin}: returns {', '.join(map(str, types))} after channels were removed")
