"""Pictures as HTML: one self-contained file, and its behavior in a browser."""

import json
import re
from html.parser import HTMLParser

import pytest
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.page import write_page
from clika_ref_visualize.pictures.writing import draw
from small_graphs import build_residual_graph


@pytest.fixture(scope="module")
def text():
    return write_page(build_drawing(build_residual_graph(), subtitle="as written")).decode()


class Elements(HTMLParser):
    """All elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def keys(self, kind: str) -> set[str]:
        return {attrs["data-key"] for _, attrs in self.found if attrs.get("class") == kind}

    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.found if "id" in attrs]


def read_layout(text: str):
    (found,) = re.findall(r'<script id="layout" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_write_page_loads_no_external_resources(text):
    """The page loads nothing from the network."""
    sources = [(tag, attrs) for tag, attrs in Elements(text).found if attrs.keys() & {"src", "href", "xlink:href"}]
    assert not sources
    assert "default-src 'none'" in text
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", text)


def test_write_page_contains_elements_of_script(text):
    """Each element that the script looks up exists once."""
    looked_for = re.findall(r'getElementById\("(\w+)"\)', text)
    assert looked_for
    ids = Elements(text).ids()
    assert set(looked_for) <= set(ids)
    assert len(ids) == len(set(ids))


def test_write_page_layout_names_all_boxes_and_groups(text):
    """The embedded layout names each box and group of the picture."""

    def keys(group):
        for member in group["members"]:
            yield member["key"]
            yield from keys(member.get("group", {"members": []}))

    elements = Elements(text)
    assert set(keys(read_layout(text))) == elements.keys("box") | elements.keys("group")


def test_write_page_layout_has_route_per_path(text):
    """The embedded layout has a route for each path of the picture."""

    def count_routes(group):
        count = len(group["routes"])
        return count + sum(count_routes(member["group"]) for member in group["members"] if "group" in member)

    assert count_routes(read_layout(text)) == len(re.findall(r"data-route=", text))


def test_write_page_shows_title_and_subtitle(text):
    """The page shows the title and the subtitle."""
    assert "<title>Residual</title>" in text
    assert "8 nodes, as written" in text


def test_write_page_escapes_script_end_in_names():
    """Names that contain a script end tag do not end the script."""
    graph = build_residual_graph()
    graph.name = "</script><script>alert(1)</script>"
    text = write_page(build_drawing(graph)).decode()
    assert len(re.findall(r"</script>", text)) == 2
    assert read_layout(text)["title"] == "</script><script>alert(1)</script>"


@pytest.fixture
def page(open_page, tmp_path):
    return open_page(draw(build_residual_graph(), tmp_path / "model.html"), width=1200)


def read_height(page, key):
    return page.locator(f'[data-key="{key}"]').bounding_box()["height"]


@pytest.mark.slow
def test_page_browser_draws_all_boxes(page):
    """All boxes and edges are drawn in a browser."""
    lines = page.eval_on_selector_all("path[data-route]", "paths => paths.map(path => path.getAttribute('d'))")
    assert len(lines) > 10
    assert all(line.startswith("M") and "NaN" not in line and "undefined" not in line for line in lines)
    for box in page.locator(".box").all():
        assert box.bounding_box()["height"] > 10


@pytest.mark.slow
def test_page_browser_title_click_folds_module(page):
    """A click on the title folds a module; another click unfolds it."""
    before, below = read_height(page, "group body 1"), page.locator('[data-key="node layer_5"]').bounding_box()["y"]
    title = page.locator('[data-key="group body 1"] > .title')
    title.click()
    assert read_height(page, "group body 1") < before / 5
    assert title.locator("text").text_content() == "+ body  6 nodes"
    assert page.locator('[data-key="node layer_5"]').bounding_box()["y"] < below
    assert not page.locator('[data-key="node layer_1"]').is_visible()
    title.click()
    assert read_height(page, "group body 1") == pytest.approx(before)


@pytest.mark.slow
def test_page_browser_fold_and_unfold_all(page):
    """The buttons fold and unfold all modules."""
    page.click("#fold")
    assert not page.locator('[data-key="node layer_1"]').is_visible()
    page.click("#unfold")
    assert page.locator('[data-key="node layer_1"]').is_visible()


@pytest.mark.slow
def test_page_browser_search_shows_folded_node(page):
    """A search shows and selects a node in a folded module."""
    page.click("#fold")
    page.fill("#search", "body.1.second")
    assert page.text_content("#count") == "1 of 1"
    found = page.locator(".box.match")
    assert found.get_attribute("data-key") == "node layer_4"
    area = found.bounding_box()
    assert 0 < area["x"] < 1200
    assert 0 < area["y"] < 900
    page.fill("#search", "layer")
    first = page.text_content("#count")
    page.press("#search", "Enter")
    assert page.text_content("#count") != first


@pytest.mark.slow
def test_page_browser_node_click_opens_details(page):
    """A click on a node shows its details."""
    assert not page.locator("#details").is_visible()
    page.locator('[data-key="node layer_1"]').click()
    assert "body.0.first.weight: float32[4, 8]" in page.text_content("#details pre")
    page.click("#close")
    assert not page.locator("#details").is_visible()


@pytest.mark.slow
def test_page_browser_drag_and_zoom(page):
    """The picture can be dragged, zoomed and reset."""
    box = page.locator('[data-key="input x"]')
    before = box.bounding_box()
    page.mouse.move(600, 700)
    page.mouse.down()
    page.mouse.move(650, 640, steps=4)
    page.mouse.up()
    moved = box.bounding_box()
    assert (moved["x"] - before["x"], moved["y"] - before["y"]) == pytest.approx((50, -60), abs=1)
    page.click("#zoom-in")
    assert box.bounding_box()["width"] > moved["width"] * 1.2
    page.click("#fit")
    assert box.bounding_box() == pytest.approx(before)


@pytest.mark.slow
def test_page_browser_paints_colors(page, tmp_path):
    """A screenshot contains the colors of inputs, float nodes and edges."""
    from PIL import Image  # noqa: PLC0415 - as the browser is

    page.screenshot(path=tmp_path / "shot.png")
    colors = {color for _, color in Image.open(tmp_path / "shot.png").convert("RGB").getcolors(1 << 20)}
    wanted = {"input": (0x1D, 0x5F, 0xBF), "float": (0x5A, 0x64, 0x72), "edge": (0x8A, 0x93, 0x9E)}
    assert not {name for name, color in wanted.items() if color not in colors}
