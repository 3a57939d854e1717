"""The dependency graph of pruning: the channels that can only be removed together, for each dim of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import Dim
from clika_ref.pruning.channel_dims import ChannelDims
from clika_ref.pruning.index_tracing import IndexSources
from clika_ref.pruning.units import Units

DimUnits = dict[int, Tensor]
"""The unit of each index along the dims of a tensor, by axis; dims that are not listed are kept."""


@dataclass
class DependencyGraph:
    """The units along the dims of all tensors of a graph. Indices of one unit can only be removed together (`Units`).

    Units originate from weights: each dim of a weight starts with new units, which layers and nodes then merge.
    """

    graph: Graph
    units: Units = field(default_factory=Units)
    dim_units: dict[Value, DimUnits] = field(default_factory=dict[Value, DimUnits])
    layers: dict[Node, ChannelDims] = field(default_factory=dict[Node, ChannelDims])
    """The layers that multiply by weights, in order."""
    traced_sources: dict[Any, IndexSources | None] = field(default_factory=dict[Any, "IndexSources | None"])
    """Cache of `trace_sources`, for nodes that repeat."""

    def units_of(self, value: Value) -> DimUnits:
        """Return the units along the dims of a tensor; a weight gets new ones on first use."""
        if value not in self.dim_units:
            is_weight = value.is_constant and value.type.dtype.is_floating_point
            lengths = enumerate(value.type.shape) if is_weight else ()
            self.dim_units[value] = {i: self.units.fresh(int(n)) for i, n in lengths if int(n) > 1}
            if value.name in self.graph.state:
                self.fix(value, "a call writes to it")
        return self.dim_units[value]

    def free_units(self, node: Node) -> list[int]:
        """Return the units along the dims of a node's operands and results that can be removed."""
        values = [v for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
        return self.units.free(u for v in values for some in self.units_of(v).values() for u in some.tolist())

    def fix(self, value: Value, reason: str) -> None:
        """Keep all units along the dims of a tensor."""
        for units in self.units_of(value).values():
            self.units.fix_all(units, reason)

    def remaining_indices(self, value: Value, gone: frozenset[int]) -> dict[int, Tensor]:
        """Return the indices that remain after removing units, by axis, for each dim that loses some."""
        found = {axis: self.units.remaining_indices(units, gone) for axis, units in self.units_of(value).items()}
        return {axis: indices for axis, indices in found.items() if len(indices) < len(self.units_of(value)[axis])}

    def compute_shape(self, value: Value, kept: Mapping[int, Tensor]) -> tuple[Dim, ...]:
        """Return the shape of a tensor with the kept indices, by axis; dynamic dims shrink in proportion."""
        lengths = {axis: len(units) for axis, units in self.units_of(value).items()}
        return tuple(
            _scale_dim(size, len(kept[axis]), lengths[axis]) if axis in kept else size
            for axis, size in enumerate(value.type.shape)
        )


def _scale_dim(size: Dim, kept: int, length: int) -> Dim:
    return kept if isinstance(size, int) else size * sympy.Rational(kept, length)


def is_periodic(size: Dim, units: Tensor) -> bool:
    """Whether a dim is static, or its units repeat, so that its size shrinks in proportion when some are removed.

    For example, a dim of ``4 * batch`` elements contains the four heads of all samples, sorted by sample or by head.
    """
    if isinstance(size, int):
        return True
    count = int(size.as_coeff_Mul()[0])
    if count < 2 or len(units) % count:
        return False
    periods = (units.reshape(-1, count), units.reshape(count, -1).T)
    return any(bool((rows == rows[:1]).all()) for rows in periods)
