"""Layout of pictures, for any graph: each box once, no overlaps, edges from box to box."""

import random
from itertools import combinations

import pytest
from clika_ref_visualize.pictures import layers
from clika_ref_visualize.pictures.arrangement import arrange
from clika_ref_visualize.pictures.coordinates import fit_isotonic
from clika_ref_visualize.pictures.drawing import BoxGroup, PictureDrawing
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.style import GROUP_TITLE_HEIGHT
from clika_ref_visualize.pictures.svg import write_svg
from read_pictures import Page
from small_graphs import TYPE, append_node, build_branched_graph, build_residual_graph, plus

from clika_ref.core.ir import Graph

NEAR = 0.2  # pixels: coordinates are rounded to tenths


def make_random_graph(seed: int) -> Graph:
    """Return a random graph in modules of three levels, some of them called twice."""
    chosen, graph = random.Random(seed), Graph("Random")
    values = [graph.add_input(TYPE, "x"), graph.add_input(TYPE, "y")]
    for _ in range(40):
        scope = chosen.choice(["", "a", "a.b", "a.b.c", "a.d", "e", "e.f"])
        values.append(append_node(graph, plus, chosen.choice(values), chosen.choice(values[-6:]), scope=scope))
    for value in values[-3:]:
        graph.add_output(value)
    return graph


GRAPHS = {
    "residual": build_residual_graph(),
    "branches": build_branched_graph(6),
    **{f"random {seed}": make_random_graph(seed) for seed in range(8)},
}


@pytest.fixture(params=GRAPHS.values(), ids=GRAPHS.keys())
def graph(request):
    return request.param


@pytest.fixture(params=[layers.MAX_DUMMIES, 0], ids=["dummies", "lanes"])
def page(graph, request, monkeypatch):
    monkeypatch.setattr(layers, "MAX_DUMMIES", request.param)
    monkeypatch.setattr(layers, "DUMMIES_PER_ITEM", 4 if request.param else 0)
    return Page(write_svg(build_drawing(graph)))


def test_write_svg_draws_each_node_once(graph, page):
    """Each node, input and output has exactly one box."""
    expected = [f"node {node.name}" for node in graph.nodes]
    expected += [f"input {value.name}" for value in graph.inputs]
    expected += [f"output {index}" for index in range(len(graph.outputs))]
    assert sorted(box.key for box in page.boxes) == sorted(expected)


def test_write_svg_boxes_do_not_overlap(page):
    """No two boxes overlap."""
    assert not [(a.key, b.key) for a, b in combinations(page.boxes, 2) if a.overlaps(b)]


def test_write_svg_groups_nested_or_disjoint(page):
    """Groups and boxes are nested or disjoint."""
    for group in page.groups:
        for other in (*page.groups, *page.boxes):
            if other is not group and other.overlaps(group):
                assert group.contains(other) or other.contains(group)


def test_write_svg_everything_inside_page(page):
    """Every box and group is inside the page."""
    width, height = float(page.root.get("width")), float(page.root.get("height"))
    for area in (*page.boxes, *page.groups):
        assert area.x >= 0
        assert area.y >= 0
        assert area.x + area.width <= width
        assert area.y + area.height <= height


def test_write_svg_edges_end_at_boxes_or_group_borders(page):
    """Each edge ends at a box, with an arrowhead, or at the border of a group."""
    assert page.routes
    for route in page.routes:
        x, y = route.end
        areas = page.boxes if route.has_tip else page.groups
        edges = [(a.x, a.x + a.width, y) for a in areas for y in (a.y, *([] if route.has_tip else [a.y + a.height]))]
        assert any(left <= x <= right and abs(y - edge) < NEAR for left, right, edge in edges), route


def test_write_svg_edges_start_at_boxes_groups_or_edges(page):
    """Each edge starts at a box, a group, or another edge of the same value."""
    for route in page.routes:
        x, y = route.start
        edges = [(a.x, a.x + a.width, a.y + a.height) for a in (*page.boxes, *page.groups)]
        edges += [(a.x, a.x + a.width, a.y + GROUP_TITLE_HEIGHT) for a in page.groups]
        touches = any(left <= x <= right and abs(y - edge) < NEAR for left, right, edge in edges)
        others = [w for w in page.routes if w is not route and w.tensor == route.tensor and w.start[1] < y < w.end[1]]
        assert touches or others, route


def test_write_svg_edges_point_down(page):
    """Edges never go up."""
    assert all(route.start[1] <= route.end[1] for route in page.routes)


def test_write_svg_box_has_arrowhead_per_input_value(graph, page):
    """A box has as many arrowheads as input values."""
    for node in graph.nodes:
        box = page.box(f"node {node.name}")
        tips = [
            w
            for w in page.routes
            if w.has_tip and abs(w.end[1] - box.y) < NEAR and box.x <= w.end[0] <= box.x + box.width
        ]
        made = {v for v in node.inputs if not v.is_constant}
        assert len(tips) == len(made)


def test_write_svg_texts_fit_into_boxes(page):
    """No text is wider than its box."""
    letter = 11 * 0.602  # of DejaVu Sans Mono, the widest of the fonts: its advance is 1233/2048 em
    for box in page.boxes:
        indent = 0
        for line in page.texts(box.key).splitlines():
            assert indent + len(line) * letter <= box.width


def test_write_svg_chain_straight():
    """The boxes of a chain have the same horizontal center."""
    graph = Graph("Chain")
    value = graph.add_input(TYPE, "x")
    for _ in range(5):
        value = append_node(graph, plus, value, 1.0)
    page = Page(write_svg(build_drawing(graph)))
    middles = [box.x + box.width / 2 for box in page.boxes]
    assert max(middles) - min(middles) < NEAR


def test_write_svg_residual_block_straight():
    """The boxes of a residual block have the same horizontal center."""
    page = Page(write_svg(build_drawing(build_residual_graph(1))))
    middles = [box.x + box.width / 2 for box in page.boxes]
    assert max(middles) - min(middles) < 1.0


def test_write_svg_repeated_module_drawn_per_call():
    """A module that is called again is a separate group for each call."""
    graph = Graph("Twice")
    x = graph.add_input(TYPE, "x")
    for scope in ("shared", "between", "shared"):
        x = append_node(graph, plus, append_node(graph, plus, x, 1.0, scope=scope), 2.0, scope=scope)
    graph.add_output(x)
    keys = [group.key for group in Page(write_svg(build_drawing(graph))).groups]
    assert keys == ["group shared 1", "group between 1", "group shared 2"]


def test_write_svg_empty_graph_has_no_boxes():
    """An empty graph is drawn without boxes."""
    assert Page(write_svg(build_drawing(Graph("Empty")))).boxes == []
    assert Page(write_svg(PictureDrawing("", "", BoxGroup("group", "", []), []))).boxes == []


def test_write_svg_value_with_many_readers_shares_edge():
    """A value with many readers has one shared edge."""
    graph = Graph("Everybody")
    x = graph.add_input(TYPE, "x")
    value = x
    for _ in range(400):
        value = append_node(graph, plus, value, x)
    graph.add_output(value)
    # A route of its own for each reader would have points in all layers above: 80,000 of them.
    assert write_svg(build_drawing(graph)).count(b"C") < 5 * 400


def build_long_link_graph(count: int) -> Graph:
    """Return a graph in which each node reads the previous one and any earlier one."""
    chosen, graph = random.Random(0), Graph("Long")
    values = [graph.add_input(TYPE, "x")]
    for _ in range(count):
        values.append(append_node(graph, plus, values[-1], chosen.choice(values)))
    graph.add_output(values[-1])
    return graph


def test_arrange_long_edges_point_count_linear():
    """The number of points grows with the number of edges, not with the layers that they cross."""
    routes = arrange(build_drawing(build_long_link_graph(1200))).routes
    # A point in each layer would be 1200 ** 2 / 6, of which those that carry the same share half.
    assert sum(len(route.columns) for route in routes) < 10 * 1200


def test_add_lanes_disjoint_and_reused(monkeypatch):
    """Lanes do not overlap, and free lanes are reused."""
    monkeypatch.setattr(layers, "MAX_DUMMIES", 0)
    monkeypatch.setattr(layers, "DUMMIES_PER_ITEM", 0)
    items = [layers.Item(100.0, 20.0, layer=layer) for layer in range(12)]
    ends = {(0, 5), (1, 4), (0, 3), (6, 9)}
    links = [layers.Link(source, target, 50.0, 50.0, str(source)) for source, target in sorted(ends)]
    near, far = layers.split_links_by_length(items, links)
    assert (near, far) == ([], links)
    layers.add_lanes(items, far)
    lanes = {(link.source, link.target): {items[dummy].x for dummy in link.dummies} for link in links}
    assert lanes == {(0, 3): {126.0}, (0, 5): {126.0}, (1, 4): {132.0}, (6, 9): {126.0}}
    assert [link.branches_off for link in links] == [False, True, False, False]


def test_nearest_in_order_returns_closest_sorted_numbers():
    """The result is sorted and as close as possible to the wished numbers."""
    wished, counts = [3.0, 1.0, 2.0, 7.0, 4.0], [1.0, 1.0, 2.0, 1.0, 3.0]
    found = fit_isotonic(wished, counts)
    assert found == sorted(found)
    assert found == pytest.approx([2.0, 2.0, 2.0, 4.75, 4.75])
