"""Style of pictures: colors, fonts, and distances in pixels."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref_visualize.pictures.drawing import Box, BoxGroup, Role

FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
"""Monospace fonts, so that the width of a line is known wherever it is rendered."""

ROW_FONT_SIZE, BADGE_FONT_SIZE, TITLE_FONT_SIZE = 11.0, 10.0, 12.0
"""Font sizes of rows, badges and box titles."""

LETTER_ADVANCE = 0.603
"""Width of a letter relative to its size: 0.602 in DejaVu Sans Mono and Menlo, less in the others."""

ROW_HEIGHT, HEADER_HEIGHT, ROW_PADDING = 15.0, 22.0, 8.0
"""Heights of a row and of a box title, and the padding around rows."""

GROUP_TITLE_HEIGHT, GROUP_MARGIN = 24.0, 14.0
"""Height of a group title, and the margin around its members."""

MIN_LAYER_GAP, GAP_PER_SHIFT, MAX_LAYER_GAP = 32.0, 0.06, 84.0
"""Gap between layers: the minimum, the increase per pixel of horizontal link shift, and the maximum."""

MIN_BOX_WIDTH = 96.0


@dataclass(frozen=True, slots=True)
class RoleColors:
    """Colors of a role: the title bar and the background of its boxes. White text is readable on each title bar."""

    title: str
    background: str


ROLE_COLORS = {
    Role.INTERFACE: RoleColors("#1d5fbf", "#e8f0fc"),
    Role.FLOAT: RoleColors("#5a6472", "#f6f7f9"),
    Role.QUANTIZED: RoleColors("#1a7a48", "#e7f5ec"),
    Role.WEIGHT_ONLY: RoleColors("#6d45b5", "#f0eafa"),
    Role.KEPT_IN_FLOAT: RoleColors("#9a5b00", "#fdf3e1"),
    Role.NOT_QUANTIZED: RoleColors("#b3261e", "#fcebea"),
    Role.ADAPTER: RoleColors("#00707a", "#e3f4f5"),
}
"""Colors by role. Titles differ in lightness, for color-blind readers, and badges repeat the meaning in words."""

FLOAT_EDGE_COLOR, QUANTIZED_EDGE_COLOR = "#8a939e", "#1a7a48"
TEXT_COLOR, FAINT_COLOR, FRAME_COLOR, GROUP_TITLE_COLOR = "#1f2630", "#6b7684", "#b9c2cd", "#eceff3"
GROUP_COLORS = ("#ffffff", "#fafbfc")
"""Backgrounds of groups, alternating by depth."""


def measure_text(text: str, size: float = ROW_FONT_SIZE) -> float:
    """Return the width of a line in pixels."""
    return len(text) * size * LETTER_ADVANCE


def measure_labels(box: Box) -> float:
    """Return the width of the label column of a box, with its padding."""
    longest = max((len(label) for label, _ in box.rows if label), default=0)
    return (longest + 1) * ROW_FONT_SIZE * LETTER_ADVANCE


def measure_box(box: Box) -> tuple[float, float]:
    """Return the width and height of a box."""
    title = measure_text(box.kind, TITLE_FONT_SIZE) + (
        measure_text(box.badge, BADGE_FONT_SIZE) + 14 if box.badge else 0
    )
    lines = [(measure_labels(box) if label else 0.0) + measure_text(text) for label, text in box.rows]
    width = max(MIN_BOX_WIDTH, title + 2 * ROW_PADDING, *(line + 2 * ROW_PADDING for line in lines))
    return round(width, 1), HEADER_HEIGHT + len(box.rows) * ROW_HEIGHT + ROW_PADDING


def measure_title(group: BoxGroup) -> float:
    """Return the width of a group title, including the node count shown when folded."""
    return measure_text(f"+ {group.title}  {sum(1 for _ in group.boxes()):,} nodes") + 2 * ROW_PADDING
