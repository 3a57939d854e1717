"""Files of pictures: suffixes, paths, contents of each format, and equal bytes for equal graphs."""

import hashlib
import importlib
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from clika_ref_visualize.pictures import png
from clika_ref_visualize.pictures.dot import write_dot
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.writing import PICTURE_WRITERS, draw, picture_path
from PIL import Image
from read_pictures import Page
from small_graphs import TYPE, append_node, build_residual_graph, plus

from clika_ref.core.errors import ClikaWarning, ModelError
from clika_ref.core.ir import Graph


def require_rasterizer():
    """Skip a test without resvg, which CI installs."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("resvg_py", reason="draws .png: pip install plugins/visualize[pictures]")


@pytest.mark.parametrize("suffix", [s for s in PICTURE_WRITERS if s != ".png"])
def test_draw_suffix_selects_format(suffix, tmp_path):
    """The suffix selects the file format."""
    path = draw(build_residual_graph(), tmp_path / f"model{suffix}")
    begins = {".svg": "<svg ", ".html": "<!DOCTYPE html>", ".dot": "digraph "}
    assert path == tmp_path / f"model{suffix}"
    assert path.read_text(encoding="utf-8").startswith(begins[suffix])


@pytest.mark.parametrize(
    ("given", "written"), [("model", "model.svg"), ("model.svg", "model.svg"), ("MODEL.SVG", "MODEL.SVG")]
)
def test_draw_missing_suffix_becomes_svg(given, written, tmp_path):
    """A path without a suffix gets .svg; a suffix is never doubled."""
    assert draw(build_residual_graph(), tmp_path / given) == tmp_path / written
    assert [file.name for file in tmp_path.iterdir()] == [written]


def test_draw_accepts_string_path(tmp_path):
    """The path may be a string."""
    assert draw(build_residual_graph(), f"{tmp_path}/model.dot").is_file()


def test_draw_unknown_suffix_raises_with_choices(tmp_path):
    """An unknown suffix raises an error that lists the known ones."""
    message = r"cannot write a picture to 'model.pdf': the name ends in '.pdf'. Use .svg or .html or .png or .dot"
    with pytest.raises(ModelError, match=message):
        draw(build_residual_graph(), tmp_path / "model.pdf")
    assert not [*tmp_path.iterdir()]


def test_draw_folder_raises(tmp_path):
    """A folder as the path raises an error."""
    with pytest.raises(ModelError, match=r"cannot write a picture to '.*': it is a folder. Add a file name"):
        draw(build_residual_graph(), tmp_path)


def test_draw_missing_folder_raises(tmp_path):
    """A path in a missing folder raises an error."""
    with pytest.raises(ModelError, match=r"'.*nowhere' does not exist. Create it, or choose another path"):
        draw(build_residual_graph(), tmp_path / "nowhere" / "model.svg")


def test_picture_path_no_path_raises():
    """A value that is no path raises an error."""
    with pytest.raises(ModelError, match=r"path is 7, a int. Give a path such as 'model.svg'"):
        picture_path(7)


def test_draw_failure_keeps_existing_file(tmp_path, monkeypatch):
    """A failure keeps the existing file."""
    path = draw(build_residual_graph(), tmp_path / "model.svg")
    before = path.read_bytes()

    def fail(drawing):
        raise KeyboardInterrupt

    monkeypatch.setitem(PICTURE_WRITERS, ".svg", fail)
    with pytest.raises(KeyboardInterrupt):
        draw(build_residual_graph(3), path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from small_graphs import build_residual_graph
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.writing import PICTURE_WRITERS
drawing = build_drawing(build_residual_graph(3))
print(*(hashlib.sha256(PICTURE_WRITERS[suffix](drawing)).hexdigest() for suffix in (".svg", ".html", ".dot")))
"""


@pytest.mark.slow
def test_draw_same_bytes_in_every_process():
    """The same graph gives the same bytes in any process."""

    def compute_digests(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DIGEST, str(Path(__file__).parent)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    own = [
        hashlib.sha256(PICTURE_WRITERS[suffix](build_drawing(build_residual_graph(3)))).hexdigest()
        for suffix in (".svg", ".html", ".dot")
    ]
    assert compute_digests("1") == compute_digests("2") == own


# Graphviz


def test_write_dot_contains_nodes_clusters_and_edges():
    """Graphviz gets each node in its cluster, and each edge."""
    text = write_dot(build_drawing(build_residual_graph())).decode()
    assert text.startswith('digraph "Residual" {')
    assert text.rstrip().endswith("}")
    assert len(re.findall(r"^ *n\d+ \[", text, re.MULTILINE)) == 10
    assert re.findall(r'label="(body[^"]*)"; color', text) == ["body", "body.0", "body.1"]
    assert len(re.findall(r"n\d+ -> n\d+ \[", text)) == 11
    assert text.count("{") == text.count("}") == 4


def test_write_dot_escapes_special_names():
    """Quotes and backslashes in names are escaped for Graphviz."""
    graph = Graph('a "b" \\ c')
    graph.add_output(append_node(graph, plus, graph.add_input(TYPE, 'x"y\\'), 1.0))
    text = write_dot(build_drawing(graph)).decode()
    assert 'digraph "a \\"b\\" \\\\ c" {' in text
    assert 'name x\\"y\\\\\\l' in text
    unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)  # quotes are paired
    assert '"' not in unquoted


# Pixels


def test_draw_png_has_two_pixels_per_unit(tmp_path):
    """A PNG has two pixels for each unit of the SVG, and shows letters."""
    require_rasterizer()
    image = Image.open(draw(build_residual_graph(), tmp_path / "model.png"))
    page = Page(draw(build_residual_graph(), tmp_path / "model.svg").read_bytes())
    assert image.size == tuple(pytest.approx(2 * float(page.root.get(side)), abs=2) for side in ("width", "height"))
    assert len(image.convert("RGB").getcolors(1 << 20)) > 20  # letters, whose edges are of many shades


def test_write_png_too_large_scaled_with_warning(monkeypatch):
    """A drawing above the pixel limit is scaled down, with a warning."""
    require_rasterizer()
    monkeypatch.setattr(png, "MAX_PIXELS", 4e4)
    with pytest.warns(
        ClikaWarning,
        match=r"too large to read: the picture of Residual has [\d,]+ x [\d,]+ pixels, scaled",
    ):
        image = Image.open(io.BytesIO(png.write_png(build_drawing(build_residual_graph()))))
    assert image.width * image.height == pytest.approx(4e4, rel=0.02)


def test_draw_png_without_resvg_raises_with_install_command(tmp_path, monkeypatch):
    """Without resvg_py, the error contains the command to install it."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    message = (
        r"cannot write a \.png: resvg_py is not installed\. Run pip install clika-ref-visualize\[pictures\] "
        r"\(in a clone: pip install plugins/visualize\[pictures\]; .*\), or write a \.svg\.$"
    )
    with pytest.raises(ModelError, match=message):
        draw(build_residual_graph(), tmp_path / "model.png")
    assert not [*tmp_path.iterdir()]


def test_write_png_without_fonts_raises(monkeypatch):
    """Without fonts, the error suggests installing one, and no PNG is written."""
    blank = types.SimpleNamespace(svg_to_bytes=lambda **_: b"the same whatever there is to draw")
    monkeypatch.setattr(importlib, "import_module", lambda _: blank)
    with pytest.raises(ModelError, match=r"this machine has none of the fonts .*\. Install one of them \(fonts-dejavu"):
        png.write_png(build_drawing(build_residual_graph()))
