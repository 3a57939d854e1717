"""Scales of each value and weight, from a placement and a range table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.quantization.clipping import clipped_scales
from clika_ref.quantization.layer_weights import bias_of, numbers_of, scaled_side, weight_of
from clika_ref.quantization.observers import OBSERVERS, Range
from clika_ref.quantization.placement import Placement
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.scales import raised_for_bias, scale_of, weight_scales
from clika_ref.quantization_scheme import QuantizationScheme


@dataclass
class Planner:
    """Makes plans for one graph; its weight scales do not depend on ranges, and are computed once."""

    table: RangeTable
    scheme: QuantizationScheme
    clips: bool = True
    """Whether weight scales minimize the error, instead of covering all elements."""
    _weights: dict[Node, Tensor] = field(default_factory=dict[Node, Tensor])

    def plan(self, placement: Placement, observer: str, own: Mapping[str, str] | None = None) -> Plan:
        """Return the scales of a placement, with ranges chosen by observers.

        Args:
            placement: the values and nodes to quantize.
            observer: one of `OBSERVERS`, for all values without their own.
            own: observers of single values, by name.
        """
        own = own or {}
        plan = Plan(self.scheme, floats={node.name: reason for node, reason in placement.floats.items()})
        for value, source in placement.scaled_as.items():
            observe = OBSERVERS[own.get(source.name, observer)]
            held = [observe(self.table.values[v.name]) for v in (source, *placement.joined_with.get(source, ()))]
            covered = Range(min(part.low for part in held), max(part.high for part in held))
            plan.activations[value.name] = scale_of(covered, self.scheme.activations)
            if source is not value:
                plan.scaled_as[value.name] = source.name
        for node in placement.layers:
            plan.weights[node.name] = self._scales(node, plan)
        return plan

    def _scales(self, node: Node, plan: Plan) -> Tensor:
        if node not in self._weights:
            find = clipped_scales if self.clips else weight_scales
            self._weights[node] = find(numbers_of(weight_of(node)), scaled_side(node, self.scheme), self.scheme.weights)
        bias = bias_of(node)
        if node.kind in self.scheme.integer_bias and isinstance(bias, Value) and bias.data is not None:
            read = plan.activations[node.inputs[0].name].scale
            return raised_for_bias(self._weights[node], bias.data, read)
        return self._weights[node]
