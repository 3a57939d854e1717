"""First step of the layout: which layer each item of a group stands in, and by which stations long links pass others.

Source: Sugiyama, Tagawa, Toda, Methods for Visual Understanding of Hierarchical System Structures, 1981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

MOST_STATIONS, STATIONS_PER_ITEM = 4_000, 4
"""In a group, whichever is more: by these every link of the networks that people draw passes layers. The rest of a
thicket is led around it."""

BESIDE_LANES, BETWEEN_LANES = 26.0, 6.0
"""Pixels between the items and the first lane, and between lanes."""


@dataclass(slots=True)
class Item:
    """What has a place in a layer: a box, a group, the point where a value enters or leaves, or a station."""

    width: float
    height: float
    is_station: bool = False
    """Whether it only leads a link past a layer."""
    layer: int = 0
    x: float = 0.0
    """Of its left side."""


@dataclass(slots=True)
class Link:
    """What leads from one item down to a later one."""

    source: int
    """The index of an item."""
    target: int
    source_x: float
    """From the left side of the item, as where it leaves it."""
    target_x: float
    carries: str
    """Links of one source that carry the same share their stations."""
    stations: list[int] = field(default_factory=list[int])
    """The items by which it passes the layers between, from top to bottom; of those that another link has passed
    already, only the last one, where it branches off."""
    branches_off: bool = False


def choose_layers(items: Sequence[Item], links: Sequence[Link], entries: int, exits: int) -> None:
    """Put each item into the layer below the last one of what it reads.

    What reads nothing stands just above the first that reads it. The first ``entries`` items are alone in the first
    layer, the last ``exits`` in the last one.

    Args:
        items: in an order in which each comes behind what it reads.
        links: all of which lead to a later item.
        entries: how many values enter the group.
        exits: how many leave it.
    """
    first_exit = len(items) - exits
    for item in items[entries:]:
        item.layer = 1 if entries else 0
    for link in sorted(links, key=lambda link: link.target):
        items[link.target].layer = max(items[link.target].layer, items[link.source].layer + 1)
    readers: dict[int, list[int]] = {}
    for link in links:
        readers.setdefault(link.source, []).append(link.target)
    for index in sorted(set(range(entries, first_exit)) - {link.target for link in links}, reverse=True):
        below = [items[reader].layer for reader in readers.get(index, ()) if reader < first_exit]
        items[index].layer = max(items[index].layer, min(below, default=0) - 1)
    last = max((item.layer for item in items[:first_exit]), default=-1)
    for item in items[first_exit:]:
        item.layer = last + 1


def near_and_far(items: Sequence[Item], links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
    """Return the shortest links, as many as `MOST_STATIONS` lets have one in each layer that they pass, and the others.

    Without that, a graph in which anybody reads anything would have as many stations as the square of its nodes.
    """
    spans = [items[link.target].layer - items[link.source].layer for link in links]
    room = max(MOST_STATIONS, STATIONS_PER_ITEM * len(items))
    lengths: dict[tuple[int, str], int] = {}
    far: set[int] = set()
    for index in sorted(range(len(links)), key=spans.__getitem__):
        way = (links[index].source, links[index].carries)
        room -= max(0, spans[index] - 1 - lengths.get(way, 0))
        if room < 0:
            far.add(index)
        lengths[way] = max(lengths.get(way, 0), spans[index] - 1)
    return [link for i, link in enumerate(links) if i not in far], [links[i] for i in sorted(far)]


def add_stations(items: list[Item], links: Sequence[Link]) -> list[list[int]]:
    """Let links that pass layers do so by stations, one in each, which those share that carry the same; return these.

    Returns:
        The stations of each tensor, from top to bottom.
    """
    shared: dict[tuple[int, str], list[int]] = {}
    for link in links:
        way = shared.setdefault((link.source, link.carries), [])
        above, below, known = items[link.source].layer, items[link.target].layer, len(way)
        for layer in range(above + 1 + known, below):
            way.append(len(items))
            items.append(Item(0.0, 0.0, is_station=True, layer=layer))
        passed = min(known, below - above - 1)
        link.branches_off = passed > 0
        link.stations = way[max(passed - 1, 0) : below - above - 1]
    return [way for way in shared.values() if way]


def add_lanes(items: list[Item], links: Sequence[Link]) -> None:
    """Lead links to the right of all items that have their places, down there and back: a lane for each tensor.

    A lane is another one's where that has ended above.
    """
    ways: dict[tuple[int, str], list[Link]] = {}
    for link in links:
        ways.setdefault((link.source, link.carries), []).append(link)
    right = max((item.x + item.width for item in items), default=0.0) + BESIDE_LANES
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    count = 0
    for way in sorted(ways.values(), key=lambda way: items[way[0].source].layer):
        way.sort(key=lambda link: items[link.target].layer)
        first, last = items[way[0].source].layer + 1, items[way[-1].target].layer - 1
        while taken and taken[0][0] < first:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else count
        count += lane == count
        heappush(taken, (last, lane))
        _lead(items, way, right + lane * BETWEEN_LANES, first)


def _lead(items: list[Item], way: Sequence[Link], x: float, first: int) -> None:
    """Lead the links of a tensor along one lane, which the first enters and the others leave further down."""
    before = [len(items)]
    items.append(Item(0.0, 0.0, is_station=True, layer=first, x=x))
    for link in way:
        below = items[link.target].layer - 1
        link.branches_off = link is not way[0]
        if below > items[before[-1]].layer:
            before = [before[-1], len(items)]
            items.append(Item(0.0, 0.0, is_station=True, layer=below, x=x))
            link.stations = before
        else:
            link.stations = before[-1:]


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of a link between neighbouring layers."""

    upper: int
    lower: int
    upper_x: float
    """From the left side of the upper item."""
    lower_x: float


def steps_of(links: Sequence[Link]) -> list[Step]:
    """Return the pieces of links that pass each layer by a station, those that are shared once."""
    found: list[Step] = []
    for link in links:
        way = [*([] if link.branches_off else [link.source]), *link.stations, link.target]
        for position in range(len(way) - 1):
            upper_x = link.source_x if position == 0 and not link.branches_off else 0.0
            lower_x = link.target_x if position == len(way) - 2 else 0.0
            found.append(Step(way[position], way[position + 1], upper_x, lower_x))
    return found
