"""Layout of a drawing. Each group is laid out on its own, innermost first, so that a reader can collapse it.

Layers of a group are stacked from top to bottom. Tensors enter a group at its upper border and leave at its lower
border. The layout of the enclosing group treats a group as one large box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from clika_ref_visualize.pictures.coordinates import assign_coordinates
from clika_ref_visualize.pictures.drawing import Box, BoxGroup, Edge, PictureDrawing
from clika_ref_visualize.pictures.layers import (
    Item,
    Link,
    Segment,
    add_dummies,
    add_lanes,
    assign_layers,
    split_into_segments,
    split_links_by_length,
)
from clika_ref_visualize.pictures.ordering import order_layers
from clika_ref_visualize.pictures.style import (
    GAP_PER_SHIFT,
    GROUP_MARGIN,
    GROUP_TITLE_HEIGHT,
    MAX_LAYER_GAP,
    MIN_LAYER_GAP,
    measure_box,
    measure_title,
)


@dataclass(slots=True)
class PlacedMember:
    """A box or a group at its position in the enclosing group."""

    content: Box | Arrangement
    x: float
    y: float
    width: float
    height: float
    layer: int


@dataclass(slots=True)
class Route:
    """The part of an edge inside one group: between two members, or between a member and a border of the group."""

    edge: Edge
    """The first edge of this route; other edges of the same tensor may continue it."""
    source: int | None
    """Index of a member; None if the route enters the group or branches off a route of the same tensor."""
    target: int | None
    """None if the route leaves the group."""
    columns: Sequence[tuple[float, int]]
    """The x position of the route in layers, with the layer, first to last. In omitted layers x does not change."""


@dataclass(slots=True)
class Arrangement:
    """A group with the positions of its contents, in pixels from its upper left corner."""

    group: BoxGroup
    width: float = 0.0
    height: float = 0.0
    title_height: float = 0.0
    """0 for the whole model, which has no title."""
    members: list[PlacedMember] = field(default_factory=list[PlacedMember])
    routes: list[Route] = field(default_factory=list[Route])
    tops: list[float] = field(default_factory=list[float])
    """Upper edge of each layer."""
    heights: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    """Gap below each layer."""
    entries: dict[str, float] = field(default_factory=dict[str, float])
    """x positions of entering tensors, by `Edge.tensor`."""
    exits: dict[str, float] = field(default_factory=dict[str, float])


def arrange(drawing: PictureDrawing) -> Arrangement:
    """Lay out a drawing."""
    return _arrange_group(drawing.root, _LocalEdges(drawing), depth=0)


_LocalEdge: TypeAlias = "tuple[str | None, str | None, Edge]"
"""An edge inside a group: its source and target among the members, None for the borders."""


class _LocalEdges:
    """The edges inside each group: entering, leaving, or between two of its members."""

    def __init__(self, drawing: PictureDrawing) -> None:
        self._path: dict[str, tuple[str, ...]] = {}
        self.inside: dict[str, list[_LocalEdge]] = {}
        """Edges by group key, each distinct one once."""
        self._index_paths(drawing.root, ())
        seen: set[tuple[str, str | None, str | None, str]] = set()
        for edge in drawing.edges:
            for group, source, target in self._split_by_group(edge):
                key = (group, source, target, edge.tensor)
                if key not in seen:
                    seen.add(key)
                    self.inside.setdefault(group, []).append((source, target, edge))

    def _index_paths(self, group: BoxGroup, path: tuple[str, ...]) -> None:
        path = (*path, group.key)
        for member in group.members:
            if isinstance(member, BoxGroup):
                self._index_paths(member, path)
            else:
                self._path[member.key] = (*path, member.key)

    def _split_by_group(self, edge: Edge) -> list[tuple[str, str | None, str | None]]:
        """Return the groups that an edge passes through, with its source and target in each: members, or None."""
        above, below = self._path[edge.source], self._path[edge.target]
        shared = 0
        while above[shared] == below[shared]:
            shared += 1
        parts: list[tuple[str, str | None, str | None]] = [(above[shared - 1], above[shared], below[shared])]
        parts += [(above[i], above[i + 1], None) for i in range(shared, len(above) - 1)]
        parts += [(below[i], None, below[i + 1]) for i in range(shared, len(below) - 1)]
        return parts


def _arrange_group(group: BoxGroup, local_edges: _LocalEdges, depth: int) -> Arrangement:
    inner: list[Box | Arrangement] = [
        _arrange_group(member, local_edges, depth + 1) if isinstance(member, BoxGroup) else member
        for member in group.members
    ]
    arrangement = Arrangement(group, title_height=GROUP_TITLE_HEIGHT if depth else 0.0)
    inside = local_edges.inside.get(group.key, [])
    entering = _number_tensors(edge for source, _, edge in inside if source is None)
    leaving = _number_tensors(edge for _, target, edge in inside if target is None)
    extents = [*((0.0, 0.0) for _ in entering), *map(_measure_member, inner), *((0.0, 0.0) for _ in leaving)]
    items = [Item(*extent) for extent in extents]
    index = {member.key: len(entering) + i for i, member in enumerate(group.members)}
    links = [_make_link(local_edge, inner, index, (entering, leaving)) for local_edge in inside]
    assign_layers(items, links, len(entering), len(leaving))
    near, far = split_links_by_length(items, links)
    routes = add_dummies(items, near)
    segments = split_into_segments(near)
    layers = order_layers(items, segments)
    assign_coordinates(items, layers, segments, routes)
    add_lanes(items, far)
    _measure_group(arrangement, items, layers, segments)
    first = len(entering)
    arrangement.members = [
        PlacedMember(member, item.x, 0.0, item.width, item.height, item.layer)
        for member, item in zip(inner, items[first:], strict=False)
    ]
    arrangement.routes = [
        _make_route(local_edge, link, items, first) for local_edge, link in zip(inside, links, strict=True)
    ]
    arrangement.entries = {name: items[i].x for i, name in enumerate(entering)}
    arrangement.exits = {name: items[first + len(inner) + i].x for i, name in enumerate(leaving)}
    stack_layers(arrangement)
    return arrangement


def _number_tensors(edges: Iterable[Edge]) -> dict[str, int]:
    """Return the index of each distinct tensor, in order of first use."""
    return {tensor: index for index, tensor in enumerate(dict.fromkeys(edge.tensor for edge in edges))}


def _measure_member(member: Box | Arrangement) -> tuple[float, float]:
    return measure_box(member) if isinstance(member, Box) else (member.width, member.height)


def _make_link(
    local_edge: _LocalEdge,
    inner: Sequence[Box | Arrangement],
    index: dict[str, int],
    borders: tuple[Mapping[str, int], Mapping[str, int]],
) -> Link:
    """Return the link of an edge between items. Items are numbered entries first, then members, then exits."""
    (source, target, edge), (entering, leaving) = local_edge, borders
    if source is None:
        start, start_x = entering[edge.tensor], 0.0
    else:
        start = index[source]
        producer = inner[start - len(entering)]
        start_x = measure_box(producer)[0] / 2 if isinstance(producer, Box) else producer.exits[edge.tensor]
    if target is None:
        end, end_x = len(entering) + len(inner) + leaving[edge.tensor], 0.0
    else:
        end = index[target]
        reader = inner[end - len(entering)]
        end_x = measure_box(reader)[0] / 2 if isinstance(reader, Box) else reader.entries[edge.tensor]
    return Link(start, end, start_x, end_x, edge.tensor)


def _measure_group(
    arrangement: Arrangement, items: Sequence[Item], layers: Sequence[Sequence[int]], segments: Sequence[Segment]
) -> None:
    """Compute the height of each layer, the gaps between them, and the width of the group; center the items in it."""
    arrangement.heights = [max((items[i].height for i in layer), default=0.0) for layer in layers]
    shifts = [0.0] * len(layers)
    for segment in segments:
        upper, lower = items[segment.upper], items[segment.lower]
        shift = abs(upper.x + segment.upper_x - lower.x - segment.lower_x)
        shifts[upper.layer] = max(shifts[upper.layer], shift)
    arrangement.gaps = [round(min(MIN_LAYER_GAP + GAP_PER_SHIFT * shift, MAX_LAYER_GAP), 1) for shift in shifts]
    if arrangement.gaps:
        arrangement.gaps[-1] = 0.0
    right = max((item.x + item.width for item in items), default=0.0)
    margin = GROUP_MARGIN if arrangement.title_height else 0.0
    arrangement.width = max(right + 2 * margin, measure_title(arrangement.group) if arrangement.title_height else 0.0)
    shift = (arrangement.width - right) / 2
    for item in items:
        item.x = round(item.x + shift, 1)


def _make_route(local_edge: _LocalEdge, link: Link, items: Sequence[Item], first: int) -> Route:
    """Return the route of a link, after all items have positions. Items of members begin at index ``first``."""
    source, target, edge = local_edge
    start, end = items[link.source], items[link.target]
    columns = [] if link.branches_off else [(start.x + link.source_x, start.layer)]
    columns += [(items[i].x, items[i].layer) for i in link.dummies]
    columns.append((end.x + link.target_x, end.layer))
    has_source = source is not None and not link.branches_off
    ends = (link.source - first if has_source else None, None if target is None else link.target - first)
    return Route(edge, *ends, [(round(x, 1), layer) for x, layer in columns])


def stack_layers(arrangement: Arrangement) -> None:
    """Stack the layers of a group from top to bottom, and center each member vertically in its layer."""
    y = arrangement.title_height + (GROUP_MARGIN if arrangement.title_height and not arrangement.entries else 0.0)
    arrangement.tops = []
    for height, gap in zip(arrangement.heights, arrangement.gaps, strict=True):
        arrangement.tops.append(y)
        y += height + gap
    arrangement.height = y + (GROUP_MARGIN if arrangement.title_height and not arrangement.exits else 0.0)
    for member in arrangement.members:
        space = arrangement.heights[member.layer] - member.height
        member.y = round(arrangement.tops[member.layer] + space / 2, 1)


def trace_route(arrangement: Arrangement, route: Route) -> list[tuple[str, tuple[float, ...]]]:
    """Return the path of a route: ``M`` at the start, ``V`` down to a height, ``C`` across a gap to another column."""
    members = arrangement.members
    (x, layer), *others = route.columns
    start = None if route.source is None else members[route.source]
    y = arrangement.tops[layer] if start is None else start.y + start.height
    line: list[tuple[str, tuple[float, ...]]] = [("M", (x, y))]
    for to, below in others:
        bottom, top = arrangement.tops[layer] + arrangement.heights[layer], arrangement.tops[below]
        if bottom > y:
            line.append(("V", (bottom,)))
        if to == x:
            line.append(("V", (top,)))
        else:
            middle = (bottom + top) / 2
            line.append(("C", (x, middle, to, middle, to, top)))
        x, y, layer = to, top, below
    if route.target is not None and members[route.target].y > y:
        line.append(("V", (members[route.target].y,)))
    return line
