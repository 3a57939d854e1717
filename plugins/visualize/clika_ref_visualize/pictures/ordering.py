"""Second step of the layout: order the items of each layer to reduce link crossings."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from clika_ref_visualize.pictures.layers import Item, Step

ORDERING_SWEEPS = 8
"""Alternating sweeps down and up; pictures of networks hardly change after four."""

MAX_SORTED_STEPS = 200_000
"""Maximum segments sorted over all sweeps, a second or two. A larger picture is unreadable in any order."""


def order_layers(items: Sequence[Item], steps: Sequence[Step]) -> list[list[int]]:
    """Return the items of each layer from left to right, in the order with the fewest crossings found.

    Each sweep sorts every layer by the mean position of linked items in the previous layer.
    """
    layers: list[list[int]] = [[] for _ in range(max((item.layer for item in items), default=-1) + 1)]
    for index, item in enumerate(items):
        layers[item.layer].append(index)
    if all(len(layer) < 2 for layer in layers):
        return layers
    above, below = _collect_neighbours(items, steps)
    place = _layer_positions(layers)
    best, fewest = layers, _count_crossings(steps, items, place, len(layers))
    for sweep in range(min(ORDERING_SWEEPS, MAX_SORTED_STEPS // max(len(steps), 1) + 1)):
        if not fewest:
            break
        is_down = sweep % 2 == 0
        layers = _sweep_layers(layers, above if is_down else below, place, is_down=is_down)
        count = _count_crossings(steps, items, place, len(layers))
        if count < fewest:
            best, fewest = layers, count
    return best


Neighbours = dict[int, list[tuple[int, float]]]
"""For each item: its linked items, and the relative x of each link on them, from 0 to 1."""


def _collect_neighbours(items: Sequence[Item], steps: Sequence[Step]) -> tuple[Neighbours, Neighbours]:
    above: Neighbours = {}
    below: Neighbours = {}
    for step in steps:
        above.setdefault(step.lower, []).append((step.upper, _share(step.upper_x, items[step.upper])))
        below.setdefault(step.upper, []).append((step.lower, _share(step.lower_x, items[step.lower])))
    return above, below


def _share(x: float, item: Item) -> float:
    return x / item.width if item.width else 0.5


def _layer_positions(layers: Sequence[Sequence[int]]) -> dict[int, int]:
    return {index: place for layer in layers for place, index in enumerate(layer)}


def _sweep_layers(
    layers: Sequence[Sequence[int]], neighbours: Neighbours, place: dict[int, int], *, is_down: bool
) -> list[list[int]]:
    """Return the layers after sorting them in turn; updates ``place``."""
    found = [list(layer) for layer in layers]
    for layer in found if is_down else reversed(found):
        means: dict[int, float] = {}
        for index in layer:
            linked = neighbours.get(index)
            means[index] = sum(place[i] + x for i, x in linked) / len(linked) if linked else place[index] + 0.5
        layer.sort(key=lambda index: (means[index], place[index]))
        place.update((index, position) for position, index in enumerate(layer))
    return found


def _count_crossings(steps: Sequence[Step], items: Sequence[Item], place: dict[int, int], layers: int) -> int:
    """Return the number of crossing pairs of steps: those with upper and lower ends in opposite order."""
    between: list[list[tuple[float, float]]] = [[] for _ in range(layers)]
    for step in steps:
        upper, lower = items[step.upper], items[step.lower]
        ends = (place[step.upper] + _share(step.upper_x, upper), place[step.lower] + _share(step.lower_x, lower))
        between[upper.layer].append(ends)
    count = 0
    for pairs in between:
        passed: list[float] = []
        for _, end in sorted(pairs):
            count += len(passed) - bisect_right(passed, end)
            insort(passed, end)
    return count
