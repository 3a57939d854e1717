"""Pictures as PNG: the SVG, rendered by resvg."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from typing import Any

from clika_ref.core.errors import ClikaWarning, ModelError, format_install_command
from clika_ref_visualize.pictures.drawing import PictureDrawing
from clika_ref_visualize.pictures.style import FONT
from clika_ref_visualize.pictures.svg import write_svg

DEFAULT_ZOOM = 2.0
"""Image pixels per picture pixel, for sharp text on high-density screens."""

MAX_PIXELS, MAX_EDGE_PIXELS = 80e6, 32_000.0
"""Limits of an image. Viewers reject larger ones, and rendering takes 320 MB at the limit."""

FONT_PROBE_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9" font-family="{}">{}</text></svg>'
)
"""A single letter, which renders empty if no font is found."""

MIN_READABLE_ZOOM = 0.7
"""Minimum zoom for readable rows: letters are 8 pixels high."""

MISSING_RENDERER_MESSAGE = (
    "cannot write a .png: resvg_py is not installed. Run "
    f"{format_install_command('clika-ref-visualize[pictures]')}, or write a .svg."
)

NO_FONT_MESSAGE = (
    f"cannot write a .png: this machine has none of the fonts {FONT.removesuffix(', monospace')}. Install one of them "
    "(fonts-dejavu on Debian), or write a .svg."
)

TOO_LARGE_MESSAGE = (
    "wrote a .png that is too large to read: the picture of {} has {:,.0f} x {:,.0f} pixels, scaled down. Write a "
    ".html, which folds modules, or a .svg."
)


def write_png(drawing: PictureDrawing) -> bytes:
    """Return a drawing as a PNG file.

    Raises:
        ModelError: the renderer or a font is not installed.
    """
    resvg = _import_resvg()
    text = write_svg(drawing).decode()
    width, height = map(float, re.findall(r'(?:width|height)="([\d.]+)"', text[: text.index(">")]))
    zoom = min(DEFAULT_ZOOM, math.sqrt(MAX_PIXELS / (width * height)), MAX_EDGE_PIXELS / max(width, height))
    if zoom < MIN_READABLE_ZOOM:
        warnings.warn(TOO_LARGE_MESSAGE.format(drawing.title, width, height), ClikaWarning, stacklevel=2)
    return bytes(resvg.svg_to_bytes(svg_string=text, zoom=zoom))


def _import_resvg() -> Any:
    """Import the renderer.

    Raises:
        ModelError: it is not installed, or finds no font.
    """
    try:
        resvg: Any = importlib.import_module("resvg_py")
    except ImportError as error:
        raise ModelError(MISSING_RENDERER_MESSAGE) from error
    empty, letter = (bytes(resvg.svg_to_bytes(svg_string=FONT_PROBE_SVG.format(FONT, text))) for text in (" ", "M"))
    if empty == letter:
        raise ModelError(NO_FONT_MESSAGE)
    return resvg
