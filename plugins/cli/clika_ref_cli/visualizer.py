"""The visualizer that ``--picture`` and ``clika-ref report`` need, checked before any work starts."""

from __future__ import annotations

from pathlib import Path

from clika_ref.core.registry import load_registry
from clika_ref.export.visualization import require_visualizer
from clika_ref_cli.output_paths import prefix_errors_with_flag


def resolve_picture_path(path: Path | None) -> Path | None:
    """Return the path of the picture, with a suffix, or None if no picture is requested.

    Raises:
        MisuseError: the suffix is unsupported.
        PluginError: no plugin provides a visualizer.
    """
    if path is None:
        return None
    visualizer = require_visualizer(load_registry(), "--picture")
    with prefix_errors_with_flag("--picture"):
        return visualizer.picture_path(path)


def check_can_report() -> None:
    """Check that a plugin provides a visualizer for reports.

    Raises:
        PluginError: there is none.
    """
    require_visualizer(load_registry(), "clika-ref report")
