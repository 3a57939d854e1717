"""Write pictures of graphs; the file suffix selects the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clika_ref.core.ir import Graph
from clika_ref.export.explanation import Explanation
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.serialization.atomic_files import require_suffix, write_atomically
from clika_ref_visualize.pictures.dot import write_dot
from clika_ref_visualize.pictures.drawing import PictureDrawing
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.page import write_page
from clika_ref_visualize.pictures.png import write_png
from clika_ref_visualize.pictures.svg import write_svg

PICTURE_WRITERS: Mapping[str, Callable[[PictureDrawing], bytes]] = {
    ".svg": write_svg,
    ".html": write_page,
    ".png": write_png,
    ".dot": write_dot,
}
"""Writers by file suffix."""

DEFAULT_SUFFIX = ".svg"
"""Suffix added to a path without one."""


def draw(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    explanation: Explanation | None = None,
    subtitle: str = "",
) -> Path:
    """Write a picture of a graph at any stage, and return the path of the file.

    Boxes are nodes, with name, type, shapes and attributes, in frames for modules. Q/DQ pairs have no boxes: quantized
    edges and nodes are colored instead.

    ```python
    draw(graph, "captured.svg")
    quantize_graph(graph, plan, operators)
    draw(graph, "quantized.html", plan=plan)
    ```

    Args:
        graph: the graph to draw.
        path: ``.svg``, ``.html`` (folds modules, pans, zooms, searches), ``.png`` or ``.dot``. Without a suffix,
            ``.svg`` is added.
        plan: the plan that the graph was quantized with, if any, for the precision of nodes and the reasons for float.
        explanation: a runtime's report on each node, which overrides the plan.
        subtitle: text to show after the number of nodes.

    Raises:
        ModelError: the suffix is unsupported, the file cannot be created, or the renderer for ``.png`` is missing.
    """
    target = picture_path(path)
    with write_atomically(target) as file:  # first, so that an invalid path fails before drawing
        file.write(PICTURE_WRITERS[target.suffix.lower()](build_drawing(graph, plan, explanation, subtitle=subtitle)))
    return target


def picture_path(path: Any) -> Path:
    """Return the path of a picture, with a supported suffix.

    Raises:
        ModelError: ``path`` is no path or is a folder, or its suffix is unsupported.
    """
    return require_suffix(path, "a picture", PICTURE_WRITERS, DEFAULT_SUFFIX)
