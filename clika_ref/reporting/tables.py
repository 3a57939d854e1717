"""Tables for the console and notebooks, also available as records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, Generic, TypeVar, overload

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from clika_ref.reporting.console import result_console

Row = TypeVar("Row")

CELL_STYLE = "padding: 2px 10px; white-space: nowrap; text-align: {}"


class Table(Sequence[Row], Generic[Row]):
    """A sequence of rows that prints as a table, and as HTML in notebooks.

    >>> from fractions import Fraction
    >>> table = Table([Fraction(1, 2), Fraction(3)], {"above": lambda f: f.numerator, "below": lambda f: f.denominator})
    >>> print(table)
    above  below
        1      2
        3      1
    >>> len(table), table[1]
    (2, Fraction(3, 1))

    Args:
        rows: instances of one dataclass.
        columns: headings, each with a function from a row to its cell.
        is_shown: whether to print a row; `to_dict` includes all rows.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        columns: Mapping[str, Callable[[Row], object]],
        is_shown: Callable[[Row], bool] = lambda _: True,
    ) -> None:
        self._rows, self.columns, self._is_shown = rows, columns, is_shown

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        """Return a row, or a slice of rows."""
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return render_text_table([*self.columns], self.cells())

    def __repr__(self) -> str:
        return str(self)

    def cells(self) -> list[Sequence[object]]:
        """Return the cells of the printed rows."""
        return [[tell(row) for tell in self.columns.values()] for row in self._rows if self._is_shown(row)]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a record for each row, with numbers in the units of its fields: ``DataFrame(t.to_dict())``."""
        return [to_record(row) for row in self._rows]

    def _repr_html_(self) -> str:
        lines = self.cells()
        numeric = [bool(lines) and all(_is_number(line[i]) for line in lines) for i in range(len(self.columns))]
        return render_html_table([*self.columns], ([format_cell(value) for value in line] for line in lines), numeric)


def to_record(fact: Any) -> dict[str, Any]:
    """Return the fields and properties of a dataclass by name, except nested dataclasses."""
    names = [field.name for field in fields(fact)]
    names += [name for name, member in vars(type(fact)).items() if isinstance(member, property)]
    found = {name: getattr(fact, name) for name in names}
    return {name: value for name, value in found.items() if not is_dataclass(value)}


def render_html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], to_the_right: Sequence[bool] = ()) -> str:
    """Return cells with headings as HTML; numeric columns may be right-aligned."""
    alignments = ["right" if right else "left" for right in to_the_right] or ["left"] * len(columns)
    styles = [CELL_STYLE.format(alignment) for alignment in alignments]
    head, *body = (
        "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in zip(row, styles, strict=True))
        for tag, row in [("th", columns), *(("td", row) for row in rows)]
    )
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


class HasTables:
    """A result that is shown as a series of tables and lines: by print, at a prompt, and in a notebook.

    Dataclasses that inherit from it need ``repr=False``: their fields are for programs rather than for people.
    """

    __slots__ = ()

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the tables and lines, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        shown = [part for part in self.parts() if part != ""]  # an empty string is a blank line in text output
        return "".join(f"<p>{escape(part)}</p>" if isinstance(part, str) else part._repr_html_() for part in shown)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print rows with headings on stdout; numeric columns are right-aligned.

    Args:
        columns: the heading of each column.
        rows: one cell for each column; strings are printed unchanged, numbers formatted by `format_cell`.
        title: a line above the table.
        console: where to print instead of stdout.
    """
    table = rich.table.Table(box=box.SIMPLE_HEAD)
    lines = [list(row) for row in rows]
    for index, heading in enumerate(columns):
        numeric = bool(lines) and all(_is_number(line[index]) for line in lines)
        table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(format_cell(value)) for value in line))
    console = console or result_console()
    if title is not None:
        console.print(Text(title, style="bold"))
    console.print(table)


def render_text_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as plain text, of any width.

    >>> print(render_text_table(["layer", "bits"], [("conv1", 8), ("fc", 32)]))
    layer  bits
    conv1     8
    fc       32
    """
    lines = [[format_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    numeric = [all(_is_number(line[i]) for line in lines) for i in range(len(columns))]
    shown = (
        [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)]
        for line in [[*columns], *lines]
    )
    return "\n".join("  ".join(line).rstrip() for line in shown)


def format_cell(value: object) -> str:
    """Format a cell: integers with separators, floats with four digits, None as an empty string.

    >>> [format_cell(v) for v in (1234567, 0.98765, None, "as it is", True)]
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
