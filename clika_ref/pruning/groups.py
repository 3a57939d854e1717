"""Groups of units: the channels, heads or groups of one layer, or of several layers with added outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from clika_ref.core.ir import Node
from clika_ref.pruning.dependency_graph import DependencyGraph


@dataclass
class UnitGroup:
    """Units that may be removed individually, as long as one remains."""

    channels_per_unit: int = 1
    """Number of channels of the first producer per unit."""
    fixed: int = 0
    """Number of its channels that are always kept."""
    units: list[int] = field(default_factory=list[int])
    producers: list[Node] = field(default_factory=list[Node])
    """The layers that produce the units as output channels."""
    consumers: list[Node] = field(default_factory=list[Node])
    """The layers that multiply them, used to estimate the error of a removal."""
    crossed_units: list[int] = field(default_factory=list[int])
    """Units of other groups that cross these: heads and indices within heads cannot both lose some."""

    @property
    def kind(self) -> str:
        """The kind of its units, in words."""
        if self.channels_per_unit == 1:
            return "channels"
        if any(node.attrs.get("groups", 1) > 1 for node in self.producers):
            return "groups"
        return "heads" if self.crossed_units else "blocks of channels"


def find_groups(found: DependencyGraph) -> list[UnitGroup]:
    """Return the groups of a graph, those with most producers first; each unit has a producer and a consumer.

    Of groups that cross each other, the first should be pruned: heads, which query, key and value share.
    """
    by_families: dict[frozenset[int], UnitGroup] = {}
    of_unit: dict[int, UnitGroup] = {}
    for node, layer in found.layers.items():
        channel_units = found.units_of(layer.weight).get(layer.unit_dim)
        fixed = 0 if channel_units is None else sum(not found.units.free([index]) for index in channel_units.tolist())
        for unit, dim_units, crossed in _count_units(found, channel_units):
            group = by_families.setdefault(found.units.families(unit), UnitGroup(dim_units, fixed))
            if unit not in of_unit:
                of_unit[unit] = group
                group.units.append(unit)
            if node not in group.producers:
                group.producers.append(node)
            group.crossed_units += [c for c in crossed if c not in group.crossed_units]
    for node, layer in found.layers.items():
        if layer.groups == 1:
            for unit, _, _ in _count_units(found, found.units_of(layer.x).get(layer.channel)):
                if unit in of_unit and node not in of_unit[unit].consumers:
                    of_unit[unit].consumers.append(node)
    every = [group for group in by_families.values() if group.consumers and len(group.units) > 1]
    return sorted(every, key=lambda group: -len(group.producers))


def _count_units(found: DependencyGraph, dim_units: Tensor | None) -> Iterator[tuple[int, int, set[int]]]:
    """Yield the free units along a dim, each with its number of indices, and the units that cross it there."""
    counts: dict[int, int] = {}
    crossed: dict[int, set[int]] = {}
    for index in () if dim_units is None else dim_units.tolist():
        free = found.units.free([index])
        for unit in free:
            counts[unit] = counts.get(unit, 0) + 1
            crossed.setdefault(unit, set()).update(u for u in free if u != unit)
    for unit, count in counts.items():
        yield unit, count, crossed[unit]


def find_fixed_reason(found: DependencyGraph, node: Node) -> str:
    """Return why none of the output channels of a layer can be removed: the reason for the first."""
    layer = found.layers[node]
    dim_units = found.units_of(layer.weight).get(layer.unit_dim)
    if dim_units is None:
        return "it has one output channel"
    plain = (p for index in dim_units.tolist() for p in found.units.plain(index))
    return next((reason for p in plain if (reason := found.units.reason(p))), "no layer reads its channels")
