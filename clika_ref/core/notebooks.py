"""What notebooks show: tables as HTML, which look the same wherever they come from."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CELL = "padding: 2px 10px; white-space: nowrap; text-align: {}"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], to_the_right: Sequence[bool] = ()) -> str:
    """Return cells under their headings as HTML; columns of numbers may stand to the right."""
    sides = ["right" if right else "left" for right in to_the_right] or ["left"] * len(columns)
    styles = [CELL.format(side) for side in sides]
    head, *body = (
        "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in zip(row, styles, strict=True))
        for tag, row in [("th", columns), *(("td", row) for row in rows)]
    )
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
