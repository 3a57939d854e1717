"""`Visualizer`, the interface to a plugin that draws graphs and writes reports of modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Visualizer(ABC):
    """Draws graphs and writes reports, for `ClikaModule.clika_visualize` and `ClikaModule.clika_report`.

    The methods receive plain data about a module, never the module itself: a
    `clika_ref.export.visualization.PictureFacts` or a `clika_ref.export.visualization.ReportFacts`.
    """

    name: str
    """A name that no other visualizer has."""

    @abstractmethod
    def picture_path(self, path: Any) -> Path:
        """Return the path of a picture that a user gave, with a suffix that `draw` supports.

        Raises:
            ModelError: ``path`` is no path or is a folder, or its suffix is unsupported.
        """

    @abstractmethod
    def draw(self, facts: Any, path: Path) -> None:
        """Draw a graph to a file.

        Args:
            facts: the graph and its precision, a `PictureFacts`.
            path: a path that `picture_path` returned; the suffix selects the format.

        Raises:
            ModelError: the file cannot be written.
        """

    @abstractmethod
    def render_svg(self, facts: Any) -> str:
        """Return the picture of a graph, given as a `PictureFacts`, as an ``<svg>`` element for notebooks."""

    @abstractmethod
    def write_report(self, facts: Any, file: BinaryIO, step: Callable[[str], None]) -> str:
        """Write the report of a module as HTML, and return its size in a few words, for the log.

        Args:
            facts: the facts about the module, a `ReportFacts`.
            file: an open file.
            step: receives the name of each step before it starts.

        Raises:
            ModelError: the requested form of export is unsupported.
        """
