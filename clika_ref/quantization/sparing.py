"""Sparing: layers stay float that cost little there, and make much of the error of integers."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping

from clika_ref.core.ir import Node
from clika_ref.quantization.layer_weights import weight_of
from clika_ref.quantization.sensitivity import Sensitivities, together

GAIN = 5
"""How many times its share of what all layers cost a layer's share of the error must be."""

BUDGET = 0.04
"""What share of that cost stays float for it at most."""

LEAST = 0.02
"""The share of the error below which a layer is not looked at."""

TINY = sys.float_info.min
"""What stands for no error at all, where something is divided by it."""


def spared(weighed: Sensitivities, results: Mapping[Node, str]) -> dict[Node, str]:
    """Return the layers to leave float, and why: those first that spoil most for what they cost.

    What a layer costs is its share of all products, which take time, or of all elements of weights, which take room,
    whichever is larger. Where others read its result as integers, it would cost more, and is not left.

    Args:
        weighed: the layers that are integers otherwise.
        results: the names of the values that they return, and that may be rounded.
    """
    readers = _Readers(weighed)
    costs, errors = _costs(weighed), readers.own_errors()
    found: dict[Node, str] = {}
    left = BUDGET
    for node in sorted(results, key=lambda n: costs[n] / max(errors[n], TINY)):
        is_worth_it = errors[node] > max(LEAST, GAIN * costs[node]) and costs[node] <= left
        if is_worth_it and readers.is_alone(node, results[node]):
            left -= costs[node]
            of_all = f"{errors[node]:.0%} of the error, and costs {costs[node]:.1%} of all layers"
            found[node] = f"spared: it would make {of_all}"
    return found


def _costs(weighed: Sensitivities) -> dict[Node, float]:
    """Return by layer the share of all products, or of all elements of weights."""
    elements = {node: math.prod(map(int, weight_of(node).type.shape)) for node in weighed.parts}
    products = {node: weighed.products.get(node, 0) for node in weighed.parts}
    most = max(sum(elements.values()), 1), max(sum(products.values()), 1)
    return {node: max(elements[node] / most[0], products[node] / most[1]) for node in weighed.parts}


class _Readers:
    """By how many layers each value is rounded."""

    def __init__(self, weighed: Sensitivities) -> None:
        self.weighed = weighed
        self.times = Counter(name for part in weighed.parts.values() for name in part.values)
        self.times.update(name for joint in weighed.joints.values() for name in joint.made_of)

    def is_alone(self, node: Node, name: str) -> bool:
        """Whether no layer or sum but this one has to do with a value that it rounds."""
        return self.times[name] == (name in self.weighed.parts[node].values)

    def own_errors(self) -> dict[Node, float]:
        """Return by layer the share of the error that goes with it: of its weight, and of what it alone rounds."""
        parts = self.weighed.parts
        whole = max(together(parts.values(), self.weighed.joints), TINY)
        return {
            node: (part.own + sum(s for name, s in part.values.items() if self.is_alone(node, name))) / whole
            for node, part in parts.items()
        }
