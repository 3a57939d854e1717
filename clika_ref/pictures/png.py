"""Pictures as pixels: the SVG, drawn by resvg."""

from __future__ import annotations

import importlib
from typing import Any

from clika_ref.core.errors import ClikaWarning, ModelError
from clika_ref.pictures.drawing import Drawing
from clika_ref.pictures.svg import write_svg

ZOOM = 2.0
"""Pixels of the image for each of the picture, so that letters are sharp on today's screens."""

MOST_PIXELS, LONGEST_SIDE = 80e6, 32_000.0
"""Beyond, viewers refuse an image; 320 MB is what the first one takes while it is drawn."""

LEGIBLE = 0.8
"""Zoom below which rows cannot be read: letters of 9 pixels."""

MISSING = "a .png is drawn by resvg_py, which is not installed: pip install 'clika-ref[pictures]', or write .svg"

NO_LETTERS = "resvg found no font on this machine, and would draw no letters; install one (fonts-dejavu), or write .svg"


def write_png(drawing: Drawing) -> bytes:
    """Return a drawing as a PNG file.

    Raises:
        ModelError: the package that draws it is not installed, or no font is.
    """
    renderer = _renderer()
    text = write_svg(drawing).decode()
    return bytes(renderer.svg_to_bytes(svg_string=text, zoom=ZOOM))


def _renderer() -> Any:
    try:
        return importlib.import_module("resvg_py")
    except ImportError as error:
        raise ModelError(MISSING) from error
