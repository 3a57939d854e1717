"""Plugin that provides a visualizer, which draws graphs and writes HTML reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from clika_ref.core.errors import format_count
from clika_ref.core.hooks import hookimpl
from clika_ref.core.visualizers import Visualizer
from clika_ref.export.visualization import PictureFacts, ReportFacts
from clika_ref.reporting.console import format_size

CLIKA_REF_API = 1


class HtmlVisualizer(Visualizer):
    """Draws graphs as SVG, HTML, PNG and Graphviz, and writes reports as HTML.

    Every compilation loads the plugin, and few draw. Each method therefore imports its modules itself.
    """

    name = "html"

    def picture_path(self, path: Any) -> Path:
        """Return a path with the suffix of a supported format; ``.svg`` is added to a path without a suffix.

        Raises:
            ModelError: ``path`` is no path or is a folder, or its suffix is unsupported.
        """
        from clika_ref_visualize.pictures.writing import picture_path  # noqa: PLC0415 - only for pictures

        return picture_path(path)

    def draw(self, facts: PictureFacts, path: Path) -> None:
        """Draw a graph to a file.

        Args:
            facts: the graph and its precision.
            path: the file; its suffix selects the format.

        Raises:
            ModelError: the file cannot be written, or the renderer for ``.png`` is missing.
        """
        from clika_ref_visualize.pictures.writing import draw  # noqa: PLC0415 - only for pictures

        draw(facts.graph, path, plan=facts.plan, explanation=facts.explanation, subtitle=facts.subtitle)

    def render_svg(self, facts: PictureFacts) -> str:
        """Return the picture of a graph as an ``<svg>`` element."""
        from clika_ref_visualize.pictures.graph_drawing import build_drawing  # noqa: PLC0415 - only for pictures
        from clika_ref_visualize.pictures.svg import write_svg  # noqa: PLC0415 - only for pictures

        return write_svg(build_drawing(facts.graph, facts.plan)).decode()

    def write_report(self, facts: ReportFacts, file: BinaryIO, step: Callable[[str], None]) -> str:
        """Write the report of a module as HTML, and return its number of nodes and its size, as text for the log.

        Args:
            facts: the facts about the module.
            file: a file open for writing.
            step: receives the name of each step before it starts.

        Raises:
            ModelError: the requested form of export is unsupported.
        """
        from clika_ref_visualize.report.page import render_report  # noqa: PLC0415 - only for reports
        from clika_ref_visualize.report.report_builder import build_contents  # noqa: PLC0415 - only for reports

        contents = build_contents(facts, step)
        page = render_report(contents)
        file.write(page)
        return f"{format_count(len(contents.nodes), 'node')}, {format_size(len(page))}"


@hookimpl
def clika_ref_visualizers() -> Sequence[Visualizer]:
    """Return the visualizer."""
    return [HtmlVisualizer()]
