"""Graph networks of torch_geometric."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import Architecture

GRAPHS = ((6, 10), (9, 25)), (13, 40)
"""Numbers of nodes and edges."""

BASIC_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
LAYERS: Mapping[str, Mapping[str, Any]] = {
    **{key: {} for key in ("ClusterGCNConv", "GATv2Conv", "GraphConv", "LEConv", "ResGatedGraphConv", "SAGEConv")},
    "TransformerConv": {},
    "ChebConv": {"K": 3},
    "TAGConv": {"K": 2},
    "SGConv": {"K": 2},
}
"""Layers, with their arguments besides the widths."""

WIDTH = 8


class PooledGraph(nn.Module):
    """Layers, and the mean and maximum of the nodes of each graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv, global_max_pool, global_mean_pool  # noqa: PLC0415 - as below

        self.pools = global_mean_pool, global_max_pool
        self.conv, self.head = GCNConv(WIDTH, 16), nn.Linear(32, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: Tensor) -> Tensor:
        """Return a row for each graph; ``count`` has as many elements as there are graphs."""
        hidden = self.conv(x, edge_index).relu()
        size = count.shape[0]
        pooled = [pool(hidden, batch, size) for pool in self.pools]
        return self.head(torch.cat(pooled, 1))


def _build(name: str) -> nn.Module:
    import torch_geometric.nn  # noqa: PLC0415 - only the process of an entry needs it

    torch.manual_seed(0)
    if name in BASIC_MODELS:
        return getattr(torch_geometric.nn, name)(WIDTH, 16, 2, 4)
    return getattr(torch_geometric.nn, name)(WIDTH, 4, **LAYERS[name])


def _make_graph(nodes: int, edges: int) -> dict[str, Tensor]:
    return {"x": torch.randn(nodes, WIDTH), "edge_index": torch.randint(0, nodes, (2, edges))}


def _make_batch(nodes: int, edges: int, graphs: int) -> dict[str, Tensor]:
    owner = torch.arange(nodes) * graphs // nodes
    return {**_make_graph(nodes, edges), "batch": owner, "count": torch.zeros(graphs)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    return {
        **{
            name: Architecture(functools.partial(_build, name), _make_graph, GRAPHS, "nodes, edges")
            for name in (*BASIC_MODELS, *LAYERS)
        },
        "PooledGraph": Architecture(
            PooledGraph, _make_batch, (((6, 10, 2), (9, 25, 3)), (13, 40, 4)), "nodes, edges, graphs"
        ),
    }
