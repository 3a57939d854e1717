"""First step of the layout: assign items to layers, and add dummy items where long links pass other layers.

Source: Sugiyama, Tagawa, Toda, Methods for Visual Understanding of Hierarchical System Structures, 1981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

MAX_DUMMIES, DUMMIES_PER_ITEM = 4_000, 4
"""Maximum number of dummy items in a group; the larger limit applies. It suffices for all links of typical networks. In
denser graphs, the remaining links go around the group.
"""

LANE_MARGIN, LANE_DISTANCE = 26.0, 6.0
"""Distance from the items to the first lane, and between lanes, in pixels."""


@dataclass(slots=True)
class Item:
    """An entry of a layer: a box, a group, a point where a tensor enters or leaves, or a dummy item."""

    width: float
    height: float
    is_dummy: bool = False
    """Whether the item only passes a link through its layer."""
    layer: int = 0
    x: float = 0.0
    """Left edge."""


@dataclass(slots=True)
class Link:
    """A link from an item down to a later one."""

    source: int
    """Index of an item."""
    target: int
    source_x: float
    """Start of the link, from the left edge of the source. ``target_x`` is the same for the target."""
    target_x: float
    tensor: str
    """Name of the tensor (`Edge.tensor`). Links of one tensor share their dummies."""
    dummies: list[int] = field(default_factory=list[int])
    """The items that pass the link through the layers in between, from top to bottom. Of the dummies shared with an
    earlier link, only the last is listed, where this link branches off.
    """
    branches_off: bool = False


def assign_layers(items: Sequence[Item], links: Sequence[Link], entries: int, exits: int) -> None:
    """Put each item into the layer below the lowest of its inputs.

    Items without inputs go just above their first reader. The first ``entries`` items alone form the first layer, and
    the last ``exits`` items the last layer.

    Args:
        items: items in topological order.
        links: links, each to a later item.
        entries: number of tensors that enter the group.
        exits: number of tensors that leave it.
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


def split_links_by_length(items: Sequence[Item], links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
    """Split links into the shortest, with one dummy per layer up to `MAX_DUMMIES`, and the rest.

    Without the limit, a densely connected graph would need as many dummies as the square of its nodes.
    """
    spans = [items[link.target].layer - items[link.source].layer for link in links]
    budget = max(MAX_DUMMIES, DUMMIES_PER_ITEM * len(items))
    lengths: dict[tuple[int, str], int] = {}
    far: set[int] = set()
    for index in sorted(range(len(links)), key=spans.__getitem__):
        route = (links[index].source, links[index].tensor)
        budget -= max(0, spans[index] - 1 - lengths.get(route, 0))
        if budget < 0:
            far.add(index)
        lengths[route] = max(lengths.get(route, 0), spans[index] - 1)
    return [link for i, link in enumerate(links) if i not in far], [links[i] for i in sorted(far)]


def add_dummies(items: list[Item], links: Sequence[Link]) -> list[list[int]]:
    """Add a dummy for each layer that a link passes, shared by links that carry the same, and return them.

    Returns:
        The dummies of each tensor, from top to bottom.
    """
    shared: dict[tuple[int, str], list[int]] = {}
    for link in links:
        route = shared.setdefault((link.source, link.tensor), [])
        above, below, known = items[link.source].layer, items[link.target].layer, len(route)
        for layer in range(above + 1 + known, below):
            route.append(len(items))
            items.append(Item(0.0, 0.0, is_dummy=True, layer=layer))
        passed = min(known, below - above - 1)
        link.branches_off = passed > 0
        link.dummies = route[max(passed - 1, 0) : below - above - 1]
    return [route for route in shared.values() if route]


def add_lanes(items: list[Item], links: Sequence[Link]) -> None:
    """Route links around the right of all placed items, with a lane for each tensor.

    A lane is reused below the end of an earlier one.
    """
    routes: dict[tuple[int, str], list[Link]] = {}
    for link in links:
        routes.setdefault((link.source, link.tensor), []).append(link)
    right = max((item.x + item.width for item in items), default=0.0) + LANE_MARGIN
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    count = 0
    for route in sorted(routes.values(), key=lambda route: items[route[0].source].layer):
        route.sort(key=lambda link: items[link.target].layer)
        first, last = items[route[0].source].layer + 1, items[route[-1].target].layer - 1
        while taken and taken[0][0] < first:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else count
        count += lane == count
        heappush(taken, (last, lane))
        _route_along_lane(items, route, right + lane * LANE_DISTANCE, first)


def _route_along_lane(items: list[Item], route: Sequence[Link], x: float, first: int) -> None:
    """Route the links of a tensor along one lane: the first enters it, the others leave it further down."""
    before = [len(items)]
    items.append(Item(0.0, 0.0, is_dummy=True, layer=first, x=x))
    for link in route:
        below = items[link.target].layer - 1
        link.branches_off = link is not route[0]
        if below > items[before[-1]].layer:
            before = [before[-1], len(items)]
            items.append(Item(0.0, 0.0, is_dummy=True, layer=below, x=x))
            link.dummies = before
        else:
            link.dummies = before[-1:]


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a link between adjacent layers."""

    upper: int
    lower: int
    upper_x: float
    """From the left edge of the upper item."""
    lower_x: float


def split_into_segments(links: Sequence[Link]) -> list[Segment]:
    """Return the segments of links with a dummy in each layer; shared segments appear once."""
    result: list[Segment] = []
    for link in links:
        route = [*([] if link.branches_off else [link.source]), *link.dummies, link.target]
        for position in range(len(route) - 1):
            upper_x = link.source_x if position == 0 and not link.branches_off else 0.0
            lower_x = link.target_x if position == len(route) - 2 else 0.0
            result.append(Segment(route[position], route[position + 1], upper_x, lower_x))
    return result
