"""A canvas of texts, boxes and arrows that renders as SVG, in the colors and the font of the product's own pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from clika_ref_visualize.pictures.style import (
    FAINT_COLOR,
    FLOAT_EDGE_COLOR,
    FONT,
    FRAME_COLOR,
    ROW_FONT_SIZE,
    TEXT_COLOR,
    measure_text,
)

MAX_WIDTH = 900.0
"""Maximum width of a picture in pixels: the column of a page on GitHub."""

MARGIN, TITLE_SIZE, LINE_HEIGHT = 20.0, 15.0, 15.0
"""Margin of a picture, font size of its title, and distance of two lines of text."""

TOP = MARGIN + TITLE_SIZE + 18
"""First y coordinate below the title."""


class Canvas:
    """A picture under construction. Coordinates are pixels, from the top left.

    Args:
        title: the first line of the picture, and its name for screen readers.
        description: the content in a sentence, for screen readers.
        width: of the picture, at most `MAX_WIDTH`.
    """

    def __init__(self, title: str, description: str, width: float = MAX_WIDTH) -> None:
        self.title, self.description, self.width, self.bottom = title, description, width, 0.0
        self._elements: list[str] = []
        self.text(MARGIN, MARGIN + TITLE_SIZE - 3, title, size=TITLE_SIZE, is_bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = ROW_FONT_SIZE,
        color: str = TEXT_COLOR,
        anchor: str = "start",
        is_bold: bool = False,
        max_width: float | None = None,
    ) -> None:
        """Add a line of text.

        Args:
            x: the start of the line, its middle or its end, by ``anchor``.
            y: the baseline.
            text: the line.
            size: of the font, in pixels.
            color: of the letters.
            anchor: ``"start"``, ``"middle"`` or ``"end"``.
            is_bold: whether letters are bold.
            max_width: the available width; by default the rest of the picture.

        Raises:
            ValueError: the text is wider than the available width.
        """
        width = measure_text(text, size)
        if max_width is None:
            max_width = {"start": self.width - x, "middle": 2 * min(x, self.width - x), "end": x}[anchor]
        if width > max_width:
            raise ValueError(
                f"draw {self.title!r}: {text!r} is {width:.0f} pixels wide, and has {max_width:.0f}. Shorten it."
            )
        weight = ' font-weight="bold"' if is_bold else ""
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" fill="{color}"'
        self._elements.append(
            f'<text {place} text-anchor="{anchor}"{weight} xml:space="preserve">{escape(text, quote=False)}</text>'
        )
        self._extend(y + size / 2)

    def paragraph(self, x: float, y: float, text: str, width: float, *, color: str = FAINT_COLOR) -> float:
        """Add text in lines of at most a width, and return the baseline of the line after it."""
        for line in wrap(text, width):
            self.text(x, y, line, color=color, max_width=width)
            y += LINE_HEIGHT
        return y

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = FRAME_COLOR,
        radius: float = 5,
    ) -> None:
        """Add a rectangle with rounded corners."""
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self._elements.append(f'<rect {place} rx="{_number(radius)}" fill="{fill}" stroke="{stroke}"/>')
        self._extend(y + height)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str = FLOAT_EDGE_COLOR,
        width: float = 1.4,
        dash: str = "",
    ) -> None:
        """Add a line through points, dashed if ``dash`` gives lengths (``"4 3"``)."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        way = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        style = f'fill="none" stroke="{color}" stroke-width="{_number(width)}"{dashed}'
        self._elements.append(f'<polyline points="{way}" {style}/>')
        self._extend(max(y for _, y in points))

    def arrow(self, points: Sequence[tuple[float, float]], *, color: str = FLOAT_EDGE_COLOR) -> None:
        """Add a line through points, with a tip at its end; the last part is horizontal or vertical."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        self.line([*points[:-1], (x1 - 5 * dx, y1 - 5 * dy)], color=color)
        wings = [(x1 - 7 * dx + 4 * s * dy, y1 - 7 * dy + 4 * s * dx) for s in (1, -1)]
        tip = " ".join(f"{_number(x)},{_number(y)}" for x, y in [(x1, y1), *wings])
        self._elements.append(f'<polygon points="{tip}" fill="{color}"/>')

    def swatch(self, x: float, y: float, color: str, text: str) -> float:
        """Add a colored square with its meaning, and return the x coordinate after it."""
        self.box(x, y - 10, 12, 12, fill=color, stroke=color, radius=2)
        self.text(x + 18, y, text)
        return x + 18 + measure_text(text) + 22

    def render(self) -> bytes:
        """Return the picture as an SVG file, as high as its contents."""
        if self.width > MAX_WIDTH:
            raise ValueError(f"draw {self.title!r}: it is {self.width:.0f} pixels wide. Use at most {MAX_WIDTH:.0f}.")
        size = f'width="{_number(self.width)}" height="{_number(self.bottom + MARGIN)}"'
        box = f'viewBox="0 0 {_number(self.width)} {_number(self.bottom + MARGIN)}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" font-family="{FONT}">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.description)}</desc>",
            f'<rect {size} rx="6" fill="#ffffff"/>',
            *self._elements,
            "</svg>",
        ]
        return ("\n".join(lines) + "\n").encode()

    def _extend(self, y: float) -> None:
        self.bottom = max(self.bottom, y)


def wrap(text: str, width: float) -> list[str]:
    """Return a text in lines of at most a width in pixels."""
    letters = int(width / measure_text("x") + 1e-6)  # 1e-6: a text of exactly this width fits
    return textwrap.wrap(text, max(1, letters))


def _number(value: float) -> str:
    """Format a coordinate in tenths of a pixel, so that rounding errors of sums are not visible.

    >>> _number(12.0), _number(1 / 3)
    ('12', '0.3')
    """
    return f"{round(value, 1):g}"
