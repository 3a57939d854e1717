"""From a placement and a range table to the scales of each value and weight."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.quantization.clipping import clipped_scales
from clika_ref.quantization.observers import Observer, Range
from clika_ref.quantization.placement import Placement
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.scales import raised_for_bias, scale_of, weight_scales
from clika_ref.quantization_scheme import QuantizationScheme

Observing = Callable[[Value], Observer]
"""Chooses the observer of a value."""


def planned(
    placement: Placement, table: RangeTable, scheme: QuantizationScheme, observing: Observing, *, clips: bool = True
) -> Plan:
    """Return the scales of a placement, ranges being what observers make of the table."""
    plan = Plan(scheme)
    for value, source in placement.scaled_as.items():
        covered: Range = observing(source)(table.values[source.name])
        plan.activations[value.name] = scale_of(covered, scheme.activations)
    for node in placement.layers:
        plan.weights[node.name] = _weight_scales(node, plan, clips=clips)
    return plan


def _weight_scales(node: Node, plan: Plan, *, clips: bool) -> Tensor:
    trait = node.op.trait
    weight = node.inputs[trait.weight or 0].data
    find = clipped_scales if clips else weight_scales
    scales = find(weight, trait.axis, plan.scheme.weights)
    bias = node.inputs[trait.bias] if trait.bias is not None else None
    if plan.scheme.has_integer_bias and isinstance(bias, Value) and bias.data is not None:
        scales = raised_for_bias(scales, bias.data, plan.activations[node.inputs[0].name].scale)
    return scales
