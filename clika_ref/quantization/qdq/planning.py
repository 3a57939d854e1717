"""Scales of each value and weight, from a placement and a range table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.quantization.calibration.observers import OBSERVERS, Range
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.calibration.weight_clipping import find_clipped_scales
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import bias_of, data_of, weight_of, weight_scale_dim
from clika_ref.quantization.qdq.placement import Placement
from clika_ref.quantization.qdq.qparams import compute_qparams, compute_weight_scales, raise_scales_for_bias


@dataclass
class Planner:
    """Makes plans for one graph; its weight scales do not depend on ranges, and are computed once."""

    table: RangeTable
    """The ranges of activations."""
    scheme: QuantizationScheme
    """The quantization scheme of the target."""
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
        for value, source in placement.scale_sources.items():
            observe = OBSERVERS[own.get(source.name, observer)]
            ranges = [observe(self.table.values[v.name]) for v in (source, *placement.scale_sharers.get(source, ()))]
            covered = Range(min(part.low for part in ranges), max(part.high for part in ranges))
            plan.activations[value.name] = compute_qparams(covered, self.scheme.activations)
            if source is not value:
                plan.scale_sources[value.name] = source.name
        for node in placement.layers:
            plan.weights[node.name] = self._scales(node, plan)
        return plan

    def _scales(self, node: Node, plan: Plan) -> Tensor:
        if node not in self._weights:
            find = find_clipped_scales if self.clips else compute_weight_scales
            self._weights[node] = find(
                data_of(weight_of(node)), weight_scale_dim(node, self.scheme), self.scheme.weights
            )
        bias = bias_of(node)
        if node.op_type in self.scheme.int32_bias and isinstance(bias, Value) and bias.data is not None:
            read = plan.activations[node.inputs[0].name].scale
            row_length = weight_of(node).type.element_count // max(bias.data.numel(), 1)
            return raise_scales_for_bias(self._weights[node], bias.data, read, row_length)
        return self._weights[node]
