"""Second step of the layout: order the items of each layer to reduce link crossings."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from clika_ref_visualize.pictures.layers import Item, Segment

ORDERING_SWEEPS = 8
"""Alternating sweeps down and up; pictures of networks hardly change after four."""

MAX_SORTED_SEGMENTS = 200_000
"""Maximum segments sorted over all sweeps, a second or two. A larger picture is unreadable in any order."""


def order_layers(items: Sequence[Item], segments: Sequence[Segment]) -> list[list[int]]:
    """Return the items of each layer from left to right, in the order with the fewest crossings found.

    Each sweep sorts every layer by the mean position of linked items in the previous layer.
    """
    layers: list[list[int]] = [[] for _ in range(max((item.layer for item in items), default=-1) + 1)]
    for index, item in enumerate(items):
        layers[item.layer].append(index)
    if all(len(layer) < 2 for layer in layers):
        return layers
    above, below = _collect_neighbors(items, segments)
    positions = _index_positions(layers)
    best, fewest = layers, _count_crossings(segments, items, positions, len(layers))
    for sweep in range(min(ORDERING_SWEEPS, MAX_SORTED_SEGMENTS // max(len(segments), 1) + 1)):
        if not fewest:
            break
        is_down = sweep % 2 == 0
        layers = _sweep_layers(layers, above if is_down else below, positions, is_down=is_down)
        count = _count_crossings(segments, items, positions, len(layers))
        if count < fewest:
            best, fewest = layers, count
    return best


Neighbors = dict[int, list[tuple[int, float]]]
"""For each item: its linked items, and the relative x of each link on them, from 0 to 1."""


def _collect_neighbors(items: Sequence[Item], segments: Sequence[Segment]) -> tuple[Neighbors, Neighbors]:
    above: Neighbors = {}
    below: Neighbors = {}
    for segment in segments:
        above.setdefault(segment.lower, []).append((segment.upper, _relative_x(segment.upper_x, items[segment.upper])))
        below.setdefault(segment.upper, []).append((segment.lower, _relative_x(segment.lower_x, items[segment.lower])))
    return above, below


def _relative_x(x: float, item: Item) -> float:
    return x / item.width if item.width else 0.5


def _index_positions(layers: Sequence[Sequence[int]]) -> dict[int, int]:
    return {index: position for layer in layers for position, index in enumerate(layer)}


def _sweep_layers(
    layers: Sequence[Sequence[int]], neighbors: Neighbors, positions: dict[int, int], *, is_down: bool
) -> list[list[int]]:
    """Return the layers after sorting them in turn; updates ``positions``."""
    result = [list(layer) for layer in layers]
    for layer in result if is_down else reversed(result):
        means: dict[int, float] = {}
        for index in layer:
            linked = neighbors.get(index)
            means[index] = sum(positions[i] + x for i, x in linked) / len(linked) if linked else positions[index] + 0.5
        layer.sort(key=lambda index: (means[index], positions[index]))
        positions.update((index, position) for position, index in enumerate(layer))
    return result


def _count_crossings(segments: Sequence[Segment], items: Sequence[Item], positions: dict[int, int], layers: int) -> int:
    """Return the number of crossing pairs of segments: those with upper and lower ends in opposite order."""
    between: list[list[tuple[float, float]]] = [[] for _ in range(layers)]
    for segment in segments:
        upper, lower = items[segment.upper], items[segment.lower]
        upper_x = positions[segment.upper] + _relative_x(segment.upper_x, upper)
        lower_x = positions[segment.lower] + _relative_x(segment.lower_x, lower)
        between[upper.layer].append((upper_x, lower_x))
    count = 0
    for pairs in between:
        passed: list[float] = []
        for _, end in sorted(pairs):
            count += len(passed) - bisect_right(passed, end)
            insort(passed, end)
    return count
