"""Third step of the layout: x coordinates that keep links straight and items apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from clika_ref_visualize.pictures.layers import Item, Step

COORDINATE_SWEEPS = 11
"""Alternating sweeps down and up; the last one goes down. Later sweeps only move groups of unequal width by pixels."""

BOX_DISTANCE, STATION_DISTANCE = 26.0, 16.0
"""Minimum distance between neighbours of a layer, in pixels."""

BOX_LINK_WEIGHT, STATION_LINK_WEIGHT, MIXED_LINK_WEIGHT = 20.0, 0.5, 0.1
"""Weights for straight links, by the number of stations at the ends (0, 2, 1).

Links between adjacent items weigh most, since readers follow them. Links around other items are straightened last.
"""

WantedPositions = Mapping[int, Sequence[tuple[int, float, float]]]
"""For each item: its linked items, the offset from each one's x to the wanted x, and a weight."""


def assign_coordinates(
    items: Sequence[Item], layers: Sequence[Sequence[int]], steps: Sequence[Step], ways: Iterable[Sequence[int]]
) -> None:
    """Set the x of each item as close to its linked items as the order of its layer allows.

    Args:
        items: items of the group.
        layers: ordered item indices of each layer.
        steps: link segments between adjacent layers.
        ways: the stations of each tensor that skips layers, from top to bottom.
    """
    above, below = _collect_wanted_positions(items, steps)
    for layer in layers:
        x = 0.0
        for index, room in zip(layer, _minimum_distances(items, layer), strict=True):
            items[index].x = x
            x += items[index].width + room
    for sweep in range(COORDINATE_SWEEPS):
        is_down = sweep % 2 == 0
        wishes = above if is_down else below
        for layer in layers if is_down else reversed(layers):
            _place_layer(items, layer, wishes)
    _straighten(items, layers, ways)
    left = min((item.x for item in items), default=0.0)
    for item in items:
        item.x = round(item.x - left, 1)


def _collect_wanted_positions(items: Sequence[Item], steps: Sequence[Step]) -> tuple[WantedPositions, WantedPositions]:
    above: dict[int, list[tuple[int, float, float]]] = {}
    below: dict[int, list[tuple[int, float, float]]] = {}
    for step in steps:
        stations = items[step.upper].is_station + items[step.lower].is_station
        counts = (BOX_LINK_WEIGHT, MIXED_LINK_WEIGHT, STATION_LINK_WEIGHT)[stations]
        above.setdefault(step.lower, []).append((step.upper, step.upper_x - step.lower_x, counts))
        below.setdefault(step.upper, []).append((step.lower, step.lower_x - step.upper_x, counts))
    return above, below


def _minimum_distances(items: Sequence[Item], layer: Sequence[int]) -> list[float]:
    """Return the minimum distance after each item of a layer."""
    found = [
        STATION_DISTANCE if items[before].is_station or items[behind].is_station else BOX_DISTANCE
        for before, behind in pairwise(layer)
    ]
    return [*found, 0.0]


def _place_layer(items: Sequence[Item], layer: Sequence[int], wishes: WantedPositions) -> None:
    """Move the items of a layer as close to their most important links as their order allows."""
    wished: list[float] = []
    counts: list[float] = []
    for index in layer:
        linked = wishes.get(index, ())
        most = max((count for *_, count in linked), default=0.0)
        best = [items[other].x + shift for other, shift, count in linked if count == most]
        wished.append(sum(best) / len(best) if best else items[index].x)
        counts.append(most or MIXED_LINK_WEIGHT)
    rooms = _minimum_distances(items, layer)
    behind, before = [0.0], 0.0
    for index, room in zip(layer, rooms, strict=True):
        before += items[index].width + room
        behind.append(before)
    shifts = [wish - start for wish, start in zip(wished, behind, strict=False)]
    for index, start, shift in zip(layer, behind, nearest_in_order(shifts, counts), strict=False):
        items[index].x = start + shift


def _straighten(items: Sequence[Item], layers: Sequence[Sequence[int]], ways: Iterable[Sequence[int]]) -> None:
    """Align the stations of a way vertically, as far as the space between their neighbours allows."""
    place = {index: position for layer in layers for position, index in enumerate(layer)}
    for way in sorted(ways, key=lambda way: (-len(way), way)):
        run, least, most = list[int](), -math.inf, math.inf
        for station in way:
            left, right = _movable_range(items, layers[items[station].layer], place[station])
            if run and max(least, left) > min(most, right):
                _align(items, run, least, most)
                run, least, most = [], -math.inf, math.inf
            run.append(station)
            least, most = max(least, left), min(most, right)
        _align(items, run, least, most)


def _movable_range(items: Sequence[Item], layer: Sequence[int], position: int) -> tuple[float, float]:
    """Return the range of x that a station can move in."""
    least, most = -math.inf, math.inf
    if position > 0:
        before = items[layer[position - 1]]
        least = before.x + before.width + STATION_DISTANCE
    if position + 1 < len(layer):
        most = items[layer[position + 1]].x - STATION_DISTANCE
    return least, most


def _align(items: Sequence[Item], run: Sequence[int], least: float, most: float) -> None:
    if run and least <= most:
        middle = sorted(items[station].x for station in run)[len(run) // 2]
        for station in run:
            items[station].x = min(max(middle, least), most)


def nearest_in_order(wished: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to the wanted values, in weighted least squares.

    Source: pool adjacent violators; Barlow et al., Statistical Inference under Order Restrictions, 1972.

    >>> nearest_in_order([1.0, 5.0, 3.0, 8.0], [1.0, 1.0, 3.0, 1.0])
    [1.0, 3.5, 3.5, 8.0]
    """
    pools: list[tuple[float, float, int]] = []
    for wish, weight in zip(wished, counts, strict=True):
        pool = (wish, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            value, count, length = pools.pop()
            total = count + pool[1]
            pool = ((value * count + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return [value for value, _, length in pools for _ in range(length)]
