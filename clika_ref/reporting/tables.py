"""Tables on the console."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clika_ref.reporting.console import result_console


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print rows under their columns on stdout; columns of numbers stand to the right.

    Args:
        columns: the heading of each column.
        rows: one cell for each column; strings as they are, numbers as `cell` writes them.
        title: a line above.
        console: where to print instead of stdout.

    """
    table = Table(box=box.SIMPLE_HEAD)
    lines = [list(row) for row in rows]
    for index, heading in enumerate(columns):
        numeric = bool(lines) and all(_is_number(line[index]) for line in lines)
        table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell(value)) for value in line))
    console = console or result_console()
    if title is not None:
        console.print(Text(title, style="bold"))
    console.print(table)


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as plain text, of whatever width it needs.

    >>> print(table_text(["layer", "bits"], [("conv1", 8), ("fc", 32)]))
    layer  bits
    conv1     8
    fc       32
    """
    lines = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    numeric = [all(_is_number(line[i]) for line in lines) for i in range(len(columns))]
    shown = (
        [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)]
        for line in [[*columns], *lines]
    )
    return "\n".join("  ".join(line).rstrip() for line in shown)


def cell(value: object) -> str:
    """Return what a cell shows: integers with separators, floats with four digits, nothing for None.

    >>> [cell(v) for v in (1234567, 0.98765, None, "as it is", True)]
    ['1,234,567', '0.9877', '', 'as it is', 'yes']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: object) -> bool:
    if isinstance(value, str):  # "1.92x", "34 ms": numbers with a unit
        return re.fullmatch(r"[-+]?[\d.,]+( ?[a-zA-Z%/]{1,4})?", value) is not None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
