"""The pruning report: the removed part of each layer, the savings, and the reasons, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clika_ref.core.ir import Graph
from clika_ref.pruning.masks import MASK_PREFIX
from clika_ref.reporting.tables import HasTables, Table


@dataclass(frozen=True, slots=True)
class LayerPruning:
    """A row of the table: the result for one layer, with the reason."""

    name: str
    scope: str
    operator: str
    mask: str
    """The mask type of the layer."""
    before: tuple[int, ...]
    """Shape of its weight before pruning."""
    after: tuple[int, ...]
    itemsize: int
    """Bytes per element of its weight."""
    zeros: float
    """The masked share of its weight."""
    macs_before: int
    macs_after: int
    sensitivity: float | None
    """Relative squared error of the outputs from pruning this layer alone; None if nothing was pruned.

    For channels in several groups, the maximum over these.
    """
    decision: str
    """A description of the pruned part, or why nothing was pruned."""
    is_pruned: bool

    @property
    def bytes_saved(self) -> int:
        """The memory saved for its weight, in bytes; masked weights save none."""
        return (math.prod(self.before) - math.prod(self.after)) * self.itemsize


PRUNING_COLUMNS: Mapping[str, Callable[[LayerPruning], object]] = {
    "layer": lambda layer: layer.scope or layer.name,
    "operator": lambda layer: layer.operator,
    "mask": lambda layer: layer.mask,
    "weight": lambda layer: "x".join(map(str, layer.before)),
    "weight after": lambda layer: "x".join(map(str, layer.after)),
    "bytes saved": lambda layer: layer.bytes_saved,
    "zeros": lambda layer: f"{layer.zeros:.1%}",
    "MACs": lambda layer: layer.macs_before,
    "MACs after": lambda layer: layer.macs_after,
    "PS": lambda layer: layer.sensitivity,
    "decision": lambda layer: layer.decision,
}
"""Bytes saved are those of the weight in the module. MACs are multiplications with a weight in one call, including
masked ones. PS is the pruning sensitivity.
"""


@dataclass(frozen=True, repr=False)
class PruningReport(HasTables):
    """The results of pruning a module; prints as a table with a row for each layer and a total."""

    layers: Sequence[LayerPruning]
    """The result for each layer."""
    bytes_before: int
    """Bytes of all weights and constants before pruning."""
    bytes_after: int
    """Bytes of the same after pruning."""
    error: float
    """Relative squared error of the outputs compared with those before, on the data used for sensitivities."""

    @property
    def macs_before(self) -> int:
        """MACs with weights in one call."""
        return sum(layer.macs_before for layer in self.layers)

    @property
    def macs_after(self) -> int:
        """The same after pruning; masked weights still count."""
        return sum(layer.macs_after for layer in self.layers)

    @property
    def table(self) -> Table[LayerPruning]:
        """The layers, in order."""
        return Table(self.layers, PRUNING_COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.summarize()

    def summarize(self) -> str:
        """Return the number of pruned layers, the savings, and the error of the outputs."""
        count = sum(layer.is_pruned for layer in self.layers)
        elements = [math.prod(layer.after) for layer in self.layers]
        zeros = sum(n * layer.zeros for n, layer in zip(elements, self.layers, strict=True))
        masked = f", {zeros / sum(elements):.1%} of the weights masked" if zeros else ""
        return (
            f"Pruned {count:,}/{len(self.layers):,} layers: {self.bytes_before / 1e6:,.2f} -> "
            f"{self.bytes_after / 1e6:,.2f} MB, {self.macs_before / 1e6:,.1f} -> {self.macs_after / 1e6:,.1f} million "
            f"MACs{masked}, relative output error {self.error:.2g}"
        )


def bytes_of(graph: Graph) -> int:
    """Return the bytes of all constants except masks, which artifacts do not contain."""
    return sum(
        value.type.element_count * value.type.dtype.itemsize
        for name, value in graph.constants.items()
        if not name.startswith(MASK_PREFIX)
    )
