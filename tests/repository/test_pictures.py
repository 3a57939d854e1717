"""The pictures of the documentation: their bytes, their recorded facts, their form, and the pages that show them."""

import doctest
import re
import subprocess
from xml.etree import ElementTree as ET

import pytest
from fenced_blocks import PAGES, ROOT

from docs.building.pictures import canvas as canvas_module
from docs.building.pictures import facts as facts_module
from docs.building.pictures.canvas import MAX_WIDTH, Canvas, wrap
from docs.building.pictures.diagrams import read_layers
from docs.building.pictures.drawing import FOLDER, draw_all
from docs.building.pictures.facts import find_differences, measure_facts, read_facts

PATHS = sorted(FOLDER.glob("*.svg"))
TAG = "{http://www.w3.org/2000/svg}"


def test_pictures_drawn_again_are_equal():
    """Each picture in the repository has the bytes that the current code draws."""
    drawn = draw_all()
    stored = {path.name: path.read_bytes() for path in PATHS}
    changed = sorted(name for name in {*drawn, *stored} if drawn.get(name) != stored.get(name))
    assert changed == [], "run `make pictures`, look at the changed pictures, and commit them"


@pytest.mark.slow
def test_recorded_facts_measured_again_are_close():
    """The recorded facts are those of the current code, within the tolerance for other CPUs."""
    differences = [*find_differences(read_facts(), measure_facts())]
    assert differences == [], "run `make pictures`, look at the changed pictures, and commit them"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_picture_has_title_background_and_fits_page(path):
    """A picture names itself for screen readers, has a background for dark pages, and loads nothing."""
    root = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - our own file
    assert float(root.attrib["width"]) <= MAX_WIDTH
    assert root.findtext(f"{TAG}title")
    assert root.findtext(f"{TAG}desc")
    background = root.find(f"{TAG}rect")
    assert background is not None
    assert [background.attrib[name] for name in ("width", "height")] == [root.attrib[n] for n in ("width", "height")]
    assert (
        re.findall(r"<(?:script|image|foreignObject)|href=|url\((?!#)|@import", path.read_text(encoding="utf-8")) == []
    )


def test_each_picture_is_shown_with_alt_text():
    """Each picture is on a page, and each image of a page exists and has an alternative text."""
    found = [
        (alt, (page.parent / place).resolve())
        for page in PAGES
        for alt, place in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert {place for _, place in found} == set(PATHS)
    assert all(len(alt) > 20 for alt, _ in found), "describe the picture in a sentence"


def test_packages_picture_shows_every_layer_and_plugin():
    """The diagram of packages contains each package of the import contract, and each plugin."""
    root = ET.fromstring((FOLDER / "packages.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own file
    texts = {element.text for element in root.iter(f"{TAG}text")}
    layers = read_layers()
    assert layers[-2:] == [["core"], ["torch_internals"]]
    folders = {path.name for path in (ROOT / "clika_ref").iterdir() if (path / "__init__.py").exists()}
    assert folders <= {name for layer in layers for name in layer} <= texts
    assert {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")} <= texts


@pytest.mark.slow
def test_make_pictures_runs_the_module():
    """`make pictures` records and draws."""
    shown = subprocess.run(
        ["make", "--dry-run", "pictures"],  # noqa: S607 - as the path has it
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-m docs.building.pictures --record" in shown.stdout


def test_canvas_text_too_wide_raises():
    """A text that would be clipped is an error, with the widths."""
    canvas = Canvas("Title", "A description.", width=200)
    with pytest.raises(ValueError, match=r"draw 'Title': 'x+' is 332 pixels wide, and has 180\. Shorten it\."):
        canvas.text(20, 50, "x" * 50)


def test_wrap_text_of_exact_width_is_one_line():
    """A text of exactly the available width stays in one line, and a longer one is wrapped."""
    assert wrap("least error", 11 * 11 * 0.603) == ["least error"]
    assert wrap("least errors", 11 * 11 * 0.603) == ["least", "errors"]


@pytest.mark.parametrize(
    ("recorded", "measured", "count"),
    [
        ({"a": [1.0, "1.2e-05 dB"]}, {"a": [1.04, "1.24e-05 dB"]}, 0),
        ({"a": 1.0}, {"a": 1.1}, 1),
        ({"a": 1.0}, {"b": 1.0}, 1),
        ([8, 8], [8, 7], 1),
        (["int8"], ["float"], 1),
        ("conv2d 1.00", "conv2d 1.20", 1),
        (None, 0.1, 1),
        ([1], [1, 2], 1),
    ],
)
def test_find_differences_compares_texts_and_counts_exactly(recorded, measured, count):
    """Texts and counts must be equal, and decimal fractions close."""
    assert len([*find_differences(recorded, measured)]) == count


@pytest.mark.parametrize("module", [canvas_module, facts_module], ids=lambda module: module.__name__)
def test_pictures_doctests_pass(module):
    """The examples in docstrings are true; pytest collects none below docs."""
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)
