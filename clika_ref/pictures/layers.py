"""First step of the layout: which layer each item of a group stands in, and by which stations long links pass others.

Source: Sugiyama, Tagawa, Toda, Methods for Visual Understanding of Hierarchical System Structures, 1981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
    """The items by which it passes the layers between, from top to bottom."""
    shared: int = 0
    """How many of these another link has passed already."""


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


def add_stations(items: list[Item], links: Sequence[Link]) -> None:
    """Let links that pass layers do so by stations, one in each, which those share that carry the same."""
    shared: dict[tuple[int, str], list[int]] = {}
    for link in links:
        way = shared.setdefault((link.source, link.carries), [])
        above, below, known = items[link.source].layer, items[link.target].layer, len(way)
        for layer in range(above + 1 + len(way), below):
            way.append(len(items))
            items.append(Item(0.0, 0.0, is_station=True, layer=layer))
        link.stations = way[: below - above - 1]
        link.shared = min(known, len(link.stations))


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of a link between neighbouring layers."""

    upper: int
    lower: int
    upper_x: float
    """From the left side of the upper item."""
    lower_x: float


def steps_of(links: Sequence[Link]) -> list[Step]:
    """Return the pieces of all links, those that are shared once."""
    found: list[Step] = []
    for link in links:
        way = [link.source, *link.stations, link.target]
        for position in range(link.shared, len(way) - 1):
            upper_x = link.source_x if position == 0 else 0.0
            lower_x = link.target_x if position == len(way) - 2 else 0.0
            found.append(Step(way[position], way[position + 1], upper_x, lower_x))
    return found
