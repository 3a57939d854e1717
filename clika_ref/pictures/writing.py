"""Pictures of graphs, in files whose suffix says of which kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clika_ref.core.ir import Graph
from clika_ref.explanation import Explanation
from clika_ref.pictures.dot import write_dot
from clika_ref.pictures.drawing import Drawing
from clika_ref.pictures.page import write_page
from clika_ref.pictures.png import write_png
from clika_ref.pictures.reading import drawing_of
from clika_ref.pictures.svg import write_svg
from clika_ref.quantization.quantizing import Plan
from clika_ref.storage import path_of_kind, write_atomically

FORMATS: Mapping[str, Callable[[Drawing], bytes]] = {
    ".svg": write_svg,
    ".html": write_page,
    ".png": write_png,
    ".dot": write_dot,
}
"""What writes a drawing, by the suffix of the file."""

DEFAULT = ".svg"
"""The suffix of a path that has none."""


def draw(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    explanation: Explanation | None = None,
    subtitle: str = "",
) -> Path:
    """Write a picture of a graph, after whatever stage it is, and return the path of the file.

    Boxes are nodes, with name, type, shapes and attributes, in frames for modules. Pairs of ``quantize`` and
    ``dequantize`` are no boxes but colours: of edges that are read as integers, and of what is computed in them.

    ```python
    draw(graph, "captured.svg")
    quantize_graph(graph, plan, operators)
    draw(graph, "quantized.html", plan=plan)
    ```

    Args:
        graph: what to draw.
        path: ``.svg``, ``.html`` (folds modules, pans, zooms, searches), ``.png`` or ``.dot``; without a suffix, that
            of an SVG file is added.
        plan: whose integers the graph has, if any: it says which nodes compute with them, and why others do not.
        explanation: what a runtime makes of each node, to show in place of what was planned.
        subtitle: what else to say beside the number of nodes.

    Raises:
        ModelError: the suffix is another, there is no place for a file, or what draws a ``.png`` is not installed.
    """
    place = picture_path(path)
    with write_atomically(place) as file:  # first: where it cannot lie, nothing needs to be drawn
        file.write(FORMATS[place.suffix.lower()](drawing_of(graph, plan, explanation, subtitle=subtitle)))
    return place


def picture_path(path: Any) -> Path:
    """Return the path of a picture, with a suffix that tells its kind.

    Raises:
        ModelError: it is no path, a folder, or has another suffix.
    """
    return path_of_kind(path, "a picture", FORMATS, DEFAULT)
