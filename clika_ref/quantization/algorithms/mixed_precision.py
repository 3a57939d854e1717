"""Mixed precision: keep layers in float that cost little, and cause much of the error or gain nothing in INT8."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from clika_ref.core.ir import Node, Value
from clika_ref.core.symbols import resolve
from clika_ref.quantization.algorithms.macs import count_macs
from clika_ref.quantization.algorithms.sensitivity import Sensitivities, source_of_rounding, sum_layer_errors
from clika_ref.quantization.qdq.layer_weights import weight_of
from clika_ref.quantization.qdq.placement import Placement

MIN_ERROR_TO_COST_RATIO = 5
"""Minimum ratio of a layer's share of the error to its share of the cost of all layers."""

MAX_FLOAT_COST_SHARE = 0.04
"""Largest share of the cost of all layers that is kept in float."""

MIN_ERROR_SHARE = 0.05
"""Minimum share of the error of a layer that is kept in float.

A depthwise convolution with few MACs may take long in float: with 0.02, three of them made a conformer 1.3x slower, for
0.5 dB.
"""

MAX_MACS_WITHOUT_GAIN = 1
"""MACs for each element of its input up to which a layer gains nothing in INT8: rounding an element takes as long.

Such a layer has a single result for each vector, as in a regression, or in the box distances of a YOLO head, where
INT8 costs 2.4 points of mAP.
"""

MIN_ERROR_DIVISOR = sys.float_info.min
"""Replacement for zero in divisions by an error."""


def select_float_layers(sensitivities: Sensitivities, results: Mapping[Node, str]) -> dict[Node, str]:
    """Return the layers to keep in float, with the reason for each; those with the largest error per cost come first.

    The cost of a layer is its share of all MACs, which take time, or of all weight elements, which take memory,
    whichever is larger. A layer with a result that others read in quantized form would cost more, and is excluded.

    Args:
        sensitivities: sensitivities of the layers that are quantized otherwise.
        results: names of the values that they return, and that may be rounded.
    """
    readers = _RoundingCounts(sensitivities)
    costs, errors = _cost_shares(sensitivities), readers.compute_own_errors()
    found: dict[Node, str] = {}
    left = MAX_FLOAT_COST_SHARE
    for node in sorted(results, key=lambda n: costs[n] / max(errors[n], MIN_ERROR_DIVISOR)):
        is_worth_it = errors[node] > max(MIN_ERROR_SHARE, MIN_ERROR_TO_COST_RATIO * costs[node]) and costs[node] <= left
        if is_worth_it and readers.is_only_reader(node, results[node]):
            left -= costs[node]
            found[node] = f"{100 * errors[node]:.0f} % of the error for {100 * costs[node]:.1f} % of the cost"
    return found


def find_layers_without_gain(placement: Placement, sizes: Mapping[str, int]) -> dict[Node, str]:
    """Return the layers that compute no more than they round, with the reason for each.

    That is only decided for layers whose input nothing else reads or returns in quantized form.

    Args:
        placement: the quantized layers.
        sizes: of symbols, as in one batch; layers with other sizes are left out.
    """
    nodes = [*placement.layers, *placement.elementwise]
    rounded = [v for node in nodes for v in (node.inputs if node in placement.elementwise else [node.first_tensor])]
    rounded += [*placement.layers.values(), *placement.elementwise.values()]
    times = Counter(source_of_rounding(v, placement) for v in rounded if isinstance(v, Value))

    def find_shape(value: Value) -> Sequence[int]:
        return resolve(value.type.shape, sizes)

    found: dict[Node, str] = {}
    for node in placement.layers:
        if times[source_of_rounding(node.first_tensor, placement)] == 1 and _has_known_sizes(node, sizes):
            elements = math.prod(find_shape(node.first_tensor))
            macs = count_macs(node, find_shape)
            if elements and macs <= MAX_MACS_WITHOUT_GAIN * elements:
                found[node] = f"{macs:,} MACs for {elements:,} elements of its input: rounding them takes as long"
    return found


def _has_known_sizes(node: Node, sizes: Mapping[str, int]) -> bool:
    """Return whether all sizes of the tensors of a node follow from those of symbols."""
    shapes = [v.type.shape for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
    return {str(s) for shape in shapes for size in shape for s in getattr(size, "free_symbols", ())} <= sizes.keys()


def _cost_shares(sensitivities: Sensitivities) -> dict[Node, float]:
    """Return the share of all MACs, or of all weight elements, by layer."""
    elements = {node: weight_of(node).type.element_count for node in sensitivities.parts}
    macs = {node: sensitivities.macs.get(node, 0) for node in sensitivities.parts}
    totals = max(sum(elements.values()), 1), max(sum(macs.values()), 1)
    return {node: max(elements[node] / totals[0], macs[node] / totals[1]) for node in sensitivities.parts}


class _RoundingCounts:
    """Counts the layers that round each value."""

    def __init__(self, sensitivities: Sensitivities) -> None:
        self.sensitivities = sensitivities
        self.times = Counter(name for part in sensitivities.parts.values() for name in part.values)
        self.times.update(name for joint in sensitivities.joints.values() for name in joint.operands)

    def is_only_reader(self, node: Node, name: str) -> bool:
        """Return whether no other layer or sum uses a value that this layer rounds."""
        return self.times[name] == (name in self.sensitivities.parts[node].values)

    def compute_own_errors(self) -> dict[Node, float]:
        """Return by layer the share of the error that it causes alone, by its weight and values that only it rounds."""
        parts = self.sensitivities.parts
        whole = max(sum_layer_errors(parts.values(), self.sensitivities.joints), MIN_ERROR_DIVISOR)
        return {
            node: (part.own + sum(s for name, s in part.values.items() if self.is_only_reader(node, name))) / whole
            for node, part in parts.items()
        }
