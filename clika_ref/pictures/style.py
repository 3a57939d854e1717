"""How pictures look: colours, letters and distances in pixels."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.pictures.drawing import Box, Group, Role

FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
"""Of one width, so that whoever draws knows how long a line is wherever it is shown."""

LETTER, SMALL, TITLE = 11.0, 10.0, 12.0
"""Sizes of letters: of rows, of badges, and of the kinds of nodes."""

ADVANCE = 0.603
"""Width of a letter by its size: 0.602 in DejaVu Sans Mono and Menlo, less in the others."""

ROW, HEADER, PADDING = 15.0, 22.0, 8.0
"""Heights of a row and of the title of a box, and what is left free around rows."""

BAND, MARGIN = 24.0, 14.0
"""Height of the title of a group, and what is left free around its members."""

GAP, GAP_PER_SHIFT, WIDEST_GAP = 32.0, 0.06, 84.0
"""Between layers: at least, more by how far links move sideways, and at most."""

LEAST_WIDTH = 96.0


@dataclass(frozen=True, slots=True)
class Colours:
    """Of a role: the title of a box, and the ground below it. White letters can be read on each title."""

    title: str
    ground: str


COLOURS = {
    Role.INTERFACE: Colours("#1d5fbf", "#e8f0fc"),
    Role.FLOAT: Colours("#5a6472", "#f6f7f9"),
    Role.INTEGERS: Colours("#1a7a48", "#e7f5ec"),
    Role.WEIGHTS: Colours("#6d45b5", "#f0eafa"),
    Role.KEPT: Colours("#9a5b00", "#fdf3e1"),
    Role.MISSED: Colours("#b3261e", "#fcebea"),
    Role.ADAPTER: Colours("#00707a", "#e3f4f5"),
}
"""Their titles are told apart by who sees no red or green, too, by lightness; and badges say the same in words."""

FLOAT_EDGE, INTEGER_EDGE = "#8a939e", "#1a7a48"
INK, FAINT, FRAME, BAND_GROUND = "#1f2630", "#6b7684", "#b9c2cd", "#eceff3"
GROUP_GROUNDS = ("#ffffff", "#fafbfc")
"""Of groups, by how deep they lie."""


def width_of_text(text: str, size: float = LETTER) -> float:
    """Return how wide a line is."""
    return len(text) * size * ADVANCE


def labels_width(box: Box) -> float:
    """Return how wide the labels of a box are, with what is left free behind them."""
    longest = max((len(label) for label, _ in box.rows if label), default=0)
    return (longest + 1) * LETTER * ADVANCE


def size_of(box: Box) -> tuple[float, float]:
    """Return width and height of a box."""
    title = width_of_text(box.kind, TITLE) + (width_of_text(box.badge, SMALL) + 14 if box.badge else 0)
    lines = [(labels_width(box) if label else 0.0) + width_of_text(text) for label, text in box.rows]
    width = max(LEAST_WIDTH, title + 2 * PADDING, *(line + 2 * PADDING for line in lines))
    return round(width, 1), HEADER + len(box.rows) * ROW + PADDING


def band_width(group: Group) -> float:
    """Return how wide the title of a group is, with the number of its nodes when it is folded."""
    return width_of_text(f"+ {group.title}  {sum(1 for _ in group.boxes()):,} nodes") + 2 * PADDING
