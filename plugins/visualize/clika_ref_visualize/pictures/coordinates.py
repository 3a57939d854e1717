"""Third step of the layout: x coordinates that keep links straight and items apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from clika_ref_visualize.pictures.layers import Item, Segment

COORDINATE_SWEEPS = 11
"""Alternating sweeps down and up; the last one goes down. Later sweeps only move groups of unequal width by pixels."""

BOX_DISTANCE, DUMMY_DISTANCE = 26.0, 16.0
"""Minimum distance between neighbors of a layer, in pixels."""

BOX_LINK_WEIGHT, DUMMY_LINK_WEIGHT, MIXED_LINK_WEIGHT = 20.0, 0.5, 0.1
"""Weights for straight links, by the number of dummies at the ends (0, 2, 1).

Links between adjacent items have the largest weight, since readers follow them. Links around other items come last.
"""

TargetPositions = Mapping[int, Sequence[tuple[int, float, float]]]
"""For each item: its linked items, the offset from each one's x to the target x, and a weight."""


def assign_coordinates(
    items: Sequence[Item], layers: Sequence[Sequence[int]], segments: Sequence[Segment], routes: Iterable[Sequence[int]]
) -> None:
    """Set the x of each item as close to its linked items as the order of its layer allows.

    Args:
        items: items of the group.
        layers: ordered item indices of each layer.
        segments: link segments between adjacent layers.
        routes: the dummies of each tensor that skips layers, from top to bottom.
    """
    above, below = _collect_target_positions(items, segments)
    for layer in layers:
        x = 0.0
        for index, distance in zip(layer, _list_minimum_distances(items, layer), strict=True):
            items[index].x = x
            x += items[index].width + distance
    for sweep in range(COORDINATE_SWEEPS):
        is_down = sweep % 2 == 0
        targets = above if is_down else below
        for layer in layers if is_down else reversed(layers):
            _place_layer(items, layer, targets)
    _straighten(items, layers, routes)
    left = min((item.x for item in items), default=0.0)
    for item in items:
        item.x = round(item.x - left, 1)


def _collect_target_positions(
    items: Sequence[Item], segments: Sequence[Segment]
) -> tuple[TargetPositions, TargetPositions]:
    above: dict[int, list[tuple[int, float, float]]] = {}
    below: dict[int, list[tuple[int, float, float]]] = {}
    for segment in segments:
        dummies = items[segment.upper].is_dummy + items[segment.lower].is_dummy
        weight = (BOX_LINK_WEIGHT, MIXED_LINK_WEIGHT, DUMMY_LINK_WEIGHT)[dummies]
        above.setdefault(segment.lower, []).append((segment.upper, segment.upper_x - segment.lower_x, weight))
        below.setdefault(segment.upper, []).append((segment.lower, segment.lower_x - segment.upper_x, weight))
    return above, below


def _list_minimum_distances(items: Sequence[Item], layer: Sequence[int]) -> list[float]:
    """Return the minimum distance after each item of a layer."""
    distances = [
        DUMMY_DISTANCE if items[before].is_dummy or items[after].is_dummy else BOX_DISTANCE
        for before, after in pairwise(layer)
    ]
    return [*distances, 0.0]


def _place_layer(items: Sequence[Item], layer: Sequence[int], targets: TargetPositions) -> None:
    """Move the items of a layer as close to their most important links as their order allows."""
    positions: list[float] = []
    weights: list[float] = []
    for index in layer:
        linked = targets.get(index, ())
        largest = max((weight for *_, weight in linked), default=0.0)
        best = [items[other].x + shift for other, shift, weight in linked if weight == largest]
        positions.append(sum(best) / len(best) if best else items[index].x)
        weights.append(largest or MIXED_LINK_WEIGHT)
    distances = _list_minimum_distances(items, layer)
    offsets, offset = [0.0], 0.0
    for index, distance in zip(layer, distances, strict=True):
        offset += items[index].width + distance
        offsets.append(offset)
    shifts = [position - start for position, start in zip(positions, offsets, strict=False)]
    for index, start, shift in zip(layer, offsets, fit_isotonic(shifts, weights), strict=False):
        items[index].x = start + shift


def _straighten(items: Sequence[Item], layers: Sequence[Sequence[int]], routes: Iterable[Sequence[int]]) -> None:
    """Align the dummies of a route vertically, as far as the space between their neighbors allows."""
    order = {index: position for layer in layers for position, index in enumerate(layer)}
    for route in sorted(routes, key=lambda route: (-len(route), route)):
        run, lower, upper = list[int](), -math.inf, math.inf
        for dummy in route:
            left, right = _find_movable_range(items, layers[items[dummy].layer], order[dummy])
            if run and max(lower, left) > min(upper, right):
                _align(items, run, lower, upper)
                run, lower, upper = [], -math.inf, math.inf
            run.append(dummy)
            lower, upper = max(lower, left), min(upper, right)
        _align(items, run, lower, upper)


def _find_movable_range(items: Sequence[Item], layer: Sequence[int], position: int) -> tuple[float, float]:
    """Return the range of x that a dummy can move in."""
    lower, upper = -math.inf, math.inf
    if position > 0:
        before = items[layer[position - 1]]
        lower = before.x + before.width + DUMMY_DISTANCE
    if position + 1 < len(layer):
        upper = items[layer[position + 1]].x - DUMMY_DISTANCE
    return lower, upper


def _align(items: Sequence[Item], run: Sequence[int], lower: float, upper: float) -> None:
    if run and lower <= upper:
        middle = sorted(items[dummy].x for dummy in run)[len(run) // 2]
        for dummy in run:
            items[dummy].x = min(max(middle, lower), upper)


def fit_isotonic(positions: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to the target values, in weighted least squares.

    Source: pool adjacent violators; Barlow et al., Statistical Inference under Order Restrictions, 1972.

    >>> fit_isotonic([1.0, 5.0, 3.0, 8.0], [1.0, 1.0, 3.0, 1.0])
    [1.0, 3.5, 3.5, 8.0]
    """
    pools: list[tuple[float, float, int]] = []
    for position, weight in zip(positions, weights, strict=True):
        pool = (position, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            value, old_weight, length = pools.pop()
            total = old_weight + pool[1]
            pool = ((value * old_weight + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return [value for value, _, length in pools for _ in range(length)]
