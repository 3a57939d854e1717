"""What pruning took out of each layer, what that saves, and why it left the rest: a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clika_ref.core.ir import Graph
from clika_ref.pruning.layer_sides import LayerSides
from clika_ref.reporting.tables import Table, Told


@dataclass(frozen=True, slots=True)
class LayerPruning:
    """A line of the table: what became of a layer, and why."""

    name: str
    scope: str
    operator: str
    mask: str
    """How it was to be pruned."""
    before: tuple[int, ...]
    """The shape of its weight before."""
    after: tuple[int, ...]
    itemsize: int
    """Bytes of an element of its weight."""
    zeros: float
    """The share of its weight that is masked."""
    macs_before: int
    macs_after: int
    sensitivity: float | None
    """What the outputs miss without what went of this layer alone, as a share of their energy; None where none went.

    Of channels that go in several groups, the most that one of these makes."""
    decision: str
    """What went, or why nothing did."""
    is_pruned: bool

    @property
    def bytes_saved(self) -> int:
        """How much less memory its weight takes; zeros take as much as before."""
        return (math.prod(self.before) - math.prod(self.after)) * self.itemsize


COLUMNS: Mapping[str, Callable[[LayerPruning], object]] = {
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
"""Bytes of the weight in the module; MACs as multiplications with a weight in one call, zeros included; PS as pruning
sensitivity."""


@dataclass(frozen=True, repr=False)
class Pruning(Told):
    """What was pruned of a module; printed, a table with a line for each layer and one for all."""

    layers: Sequence[LayerPruning]
    bytes_before: int
    """Of all weights and constants."""
    bytes_after: int
    error: float
    """What the outputs miss of those before, as a share of their energy, on the data that sensitivities are of."""

    @property
    def macs_before(self) -> int:
        """Multiplications with weights in one call."""
        return sum(layer.macs_before for layer in self.layers)

    @property
    def macs_after(self) -> int:
        """The same, after channels went; what is masked counts."""
        return sum(layer.macs_after for layer in self.layers)

    @property
    def table(self) -> Table[LayerPruning]:
        """The layers, in order."""
        return Table(self.layers, COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.in_one_line()

    def in_one_line(self) -> str:
        """Return how many layers were pruned, what that saves, and what the outputs miss."""
        count = sum(layer.is_pruned for layer in self.layers)
        elements = [math.prod(layer.after) for layer in self.layers]
        zeros = sum(n * layer.zeros for n, layer in zip(elements, self.layers, strict=True))
        masked = f", {zeros / sum(elements):.1%} of the weights masked" if zeros else ""
        return (
            f"{count:,} of {len(self.layers):,} layers pruned: {self.bytes_before / 1e6:,.2f} to "
            f"{self.bytes_after / 1e6:,.2f} MB, {self.macs_before / 1e6:,.1f} to {self.macs_after / 1e6:,.1f} million "
            f"MACs{masked}; the outputs miss {self.error:.2g} of their energy"
        )


def shape_of(layer: LayerSides) -> tuple[int, ...]:
    """Return the shape of the weight of a layer."""
    return tuple(map(int, layer.weight.type.shape))


def bytes_of(graph: Graph) -> int:
    """Return what all constants take but masks, which no artifact has."""
    return sum(
        math.prod(map(int, value.type.shape)) * value.type.dtype.itemsize
        for name, value in graph.constants.items()
        if not name.startswith("clika.masks.")
    )
