"""Graph breaks: where each is, why, and which change removes it."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clika_ref.capture.messages import DATA_DEPENDENT_ADVICE, DATA_DEPENDENT_MARKERS
from clika_ref.capture.origins import format_line
from clika_ref.reporting.tables import HasTables, Table

DATA_DEPENDENT_PHRASES = (
    *DATA_DEPENDENT_MARKERS,
    "Data-dependent branching",
    "Tensor.item()",
    "depends on input Tensor data",
)
"""Phrases in Dynamo's reasons for a data-dependent branch, number or size."""

ADVICE = {
    r"builtin operator `print`|logging": "Remove the output, or print only if not torch.compiler.is_compiling().",
    r"numpy|\.numpy\(\)": "Compute with torch instead of NumPy.",
    r"torch\._dynamo\.graph_break|torch\.compiler\.disable|_dynamo\.disable": "Remove the call that asks for a break.",
    r"generator|yield": "Return a list instead of a generator.",
    r"context manager": "Move the context manager out of forward.",
}
"""The change that removes a break, by a pattern of its reason."""

OTHER_ADVICE = "Remove the call, or move it out of forward."


@dataclass(frozen=True)
class Break:
    """A line where a graph ends and Python continues."""

    function: str
    """The name of the function, such as ``forward``."""
    file: str
    """The path of its file."""
    line: int
    """The line of the statement at which the graph ends."""
    reason: str
    """Dynamo's reason, in one line."""
    is_skipped: bool = False
    """Whether the whole function runs in Python, as the break is in a loop or another block that cannot resume."""
    first_line: int = 0
    """The first line of the function, if it runs in Python."""

    @property
    def position(self) -> str:
        """File and line."""
        return format_line(self.file, self.line)

    @property
    def advice(self) -> str:
        """The change that removes the break."""
        if any(phrase in self.reason for phrase in DATA_DEPENDENT_PHRASES):
            return DATA_DEPENDENT_ADVICE
        return next((text for pattern, text in ADVICE.items() if re.search(pattern, self.reason)), OTHER_ADVICE)

    @property
    def effect(self) -> str:
        """What runs in Python because of the break."""
        return f"all of {self.function}, which cannot resume after the break" if self.is_skipped else "the statement"


def is_in_function(file: str, line: int, function_file: str, first_line: int) -> bool:
    """Return whether a line belongs to the function that begins at another line."""
    lines = linecache.getlines(function_file)[max(0, first_line - 1) :]
    return file == function_file and first_line <= line < first_line + len(inspect.getblock(lines))


def summarize_reason(reason: str) -> str:
    """Return Dynamo's reason and explanation in one line, without the hints for its own developers."""
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.splitlines()]
    return ": ".join(line.rstrip(".") for line in lines[:2] if line)


COLUMNS: Mapping[str, Callable[[Break], object]] = {
    "position": lambda row: row.position,
    "runs in Python": lambda row: row.effect,
    "reason": lambda row: row.reason,
    "change": lambda row: row.advice,
}


@dataclass(frozen=True, repr=False)
class BreakReport(HasTables):
    """The graph breaks of a model, in the order of the calls; prints three lines for each."""

    breaks: Sequence[Break]

    @property
    def table(self) -> Table[Break]:
        """A row for each break."""
        return Table(self.breaks, COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return three lines for each break: the position and the reason, what runs in Python, and the change."""
        return [
            f"{found.position} in {found.function}: {found.reason}\n"
            f"    runs in Python: {found.effect}\n    change: {found.advice}"
            for found in self.breaks
        ]
