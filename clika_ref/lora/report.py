"""The adapters of a graph and their sizes, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from clika_ref.core.errors import format_count
from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import Adapter, adapters_of
from clika_ref.reporting.tables import HasTables, Table


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """A row of the table: the adapter of one weight."""

    path: str
    """Path of the module that owns the weight."""
    operator: str
    """The operator of the layers that read the weight."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    rank: int
    parameters: int
    """Number of elements of the adapter."""

    @property
    def share(self) -> float:
        """Number of elements of the adapter, as a share of those of the weight."""
        return self.parameters / math.prod(self.shape)


ADAPTER_COLUMNS: Mapping[str, Callable[[LayerAdapter], object]] = {
    "layer": lambda layer: layer.path,
    "operator": lambda layer: layer.operator,
    "weight": lambda layer: "x".join(map(str, layer.shape)),
    "rank": lambda layer: layer.rank,
    "parameters": lambda layer: layer.parameters,
    "share of weight": lambda layer: f"{layer.share:.1%}",
}


@dataclass(frozen=True, repr=False)
class AdapterReport(HasTables):
    """The adapters of a module; prints as a table with a row for each."""

    layers: Sequence[LayerAdapter]
    """The rows of the table."""
    elements: int
    """Number of elements of all parameters except the adapters."""

    @property
    def parameters(self) -> int:
        """Number of elements of all adapters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def table(self) -> Table[LayerAdapter]:
        """The adapters, in order."""
        return Table(self.layers, ADAPTER_COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.summarize()

    def summarize(self) -> str:
        """Return the number of adapters, and their share of the module's parameters."""
        share = f"{self.parameters / max(self.elements, 1):.1%} of the {self.elements:,} other parameters"
        return f"{format_count(len(self.layers), 'adapter')}, {format_count(self.parameters, 'parameter')}, {share}"


def report_adapters(graph: Graph) -> AdapterReport:
    """Return the adapters of a graph with their sizes, and the size of its other parameters."""
    adapters = adapters_of(graph)
    matrices = {id(matrix) for adapter in adapters for matrix in (adapter.down, adapter.up)}
    others = [v for v in graph.constants.values() if id(v) not in matrices and isinstance(v.data, nn.Parameter)]
    return AdapterReport([_make_row(adapter) for adapter in adapters], sum(v.type.element_count for v in others))


def _make_row(adapter: Adapter) -> LayerAdapter:
    shape = tuple(map(int, adapter.weight.type.shape))
    count = adapter.down.type.element_count + adapter.up.type.element_count
    return LayerAdapter(adapter.path, adapter.layers[0].op_type, shape, adapter.rank, count)
