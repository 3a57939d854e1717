"""Cells of the matrix: subjects by dtypes, for every level and target, and the cases that they open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from clika_ref_conformance.profiles import ALL_DTYPES
from clika_ref_conformance.reporting.report import Detail, Report, TaskReport, find_worst_verdict
from clika_ref_conformance.verdicts import Verdict

STYLE_BY_VERDICT = {
    Verdict.PASS: "pass",
    Verdict.DEVIATION: "declared",
    Verdict.XFAIL: "declared",
    Verdict.UNSTABLE: "unstable",
    Verdict.UNSUPPORTED: "rejected",
    Verdict.NOT_RUN: "rejected",
    Verdict.UNDECLARED: "undeclared",
    Verdict.XPASS: "undeclared",
    Verdict.CRASH: "crashed",
    Verdict.HANG: "crashed",
    Verdict.MEMORY: "crashed",
}
"""Color of a verdict; failures that are not listed are wrong results."""

LETTER_BY_VERDICT = {
    Verdict.PASS: "✓",
    Verdict.DEVIATION: "Δ",
    Verdict.XFAIL: "x",
    Verdict.UNSTABLE: "~",
    Verdict.UNSUPPORTED: "-",
    Verdict.NOT_RUN: "·",
    Verdict.CRASH: "!",
    Verdict.HANG: "!",
    Verdict.MEMORY: "!",
}
"""Letter of a cell without a grade. Failures that are not listed have a cross, so that color is not needed."""

HINT_BY_LEVEL = {
    "operators": "Every operator in every dtype, on drawn and special inputs. Right halves: one artifact, all sizes.",
    "passes": "Every pass on graphs where it fires, on near misses of those, and on random graphs.",
    "pairs": "Every chain, fan-out and tap of two operators.",
}


JOINED_LEVELS = {"dynamic": "operators"}
"""Levels shown as the right halves of another level's cells, if that level was run."""


@dataclass(frozen=True)
class HalfCell:
    """One half of a cell: a color, a letter, and the indices of its cases on the page."""

    style: str
    letter: str
    title: str
    details: str


@dataclass(frozen=True)
class Row:
    """One subject, with a cell for each target and dtype: its static half and, if there is any, its dynamic half."""

    subject: str
    cells: Sequence[Sequence[HalfCell | None]]
    failing: bool


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of one target."""

    target: str
    columns: Sequence[str]


@dataclass(frozen=True)
class Tab:
    """One table of the page."""

    title: str
    hint: str
    groups: Sequence[ColumnGroup]
    rows: Sequence[Row]

    @property
    def anchor(self) -> str:
        """Its address within the page."""
        return f"level-{quote(self.title, safe='')}"

    @property
    def failures(self) -> int:
        """Number of subjects that fail."""
        return sum(row.failing for row in self.rows)


def style_of(verdict: Verdict) -> str:
    """Return the style sheet class of a verdict."""
    return STYLE_BY_VERDICT.get(verdict, "wrong")


def make_tabs(reports: Sequence[Report], prefixes: Sequence[str]) -> tuple[list[Tab], list[dict[str, Any]]]:
    """Return the tables of a page, in order of the plan, and the cases that their cells open.

    Args:
        reports: one for each target; their columns are next to each other.
        prefixes: path from the page to the folder of each report.
    """
    cases: list[dict[str, Any]] = []
    levels = dict.fromkeys(level for report in reports for level in report.levels)
    shown = [level for level in levels if JOINED_LEVELS.get(level) not in levels]
    return [_make_tab(title, levels, reports, prefixes, cases) for title in shown], cases


def _make_tab(
    title: str, levels: Iterable[str], reports: Sequence[Report], prefixes: Sequence[str], cases: list[dict[str, Any]]
) -> Tab:
    wanted = {title, *(level for level in levels if JOINED_LEVELS.get(level) == title)}
    groups: list[ColumnGroup] = []
    found: dict[str, dict[tuple[int, str, bool], list[TaskReport]]] = {}
    for index, report in enumerate(reports):
        entries = [entry for entry in report.tasks if entry.task.level in wanted]
        groups.append(ColumnGroup(report.target, sorted({e.task.dtype for e in entries}, key=_rank_dtype) or [""]))
        for entry in entries:
            task = entry.task
            found.setdefault(task.subject, {}).setdefault((index, task.dtype, task.dynamic), []).append(entry)
    halves = sorted({dynamic for locations in found.values() for _, _, dynamic in locations})
    rows: list[Row] = []
    for subject, locations in found.items():
        cells = [
            [
                _make_half(locations.get((index, dtype, dynamic), []), report, prefixes[index], cases)
                for dynamic in halves
            ]
            for index, (report, group) in enumerate(zip(reports, groups, strict=True))
            for dtype in group.columns
        ]
        entries = [entry for several in locations.values() for entry in several]
        rows.append(Row(subject, cells, any(entry.verdict.is_failure for entry in entries)))
    return Tab(title, HINT_BY_LEVEL.get(title, ""), groups, rows)


def _rank_dtype(dtype: str) -> tuple[int, str]:
    return (ALL_DTYPES.index(dtype) if dtype in ALL_DTYPES else len(ALL_DTYPES), dtype)


def _make_half(
    entries: Sequence[TaskReport], report: Report, prefix: str, cases: list[dict[str, Any]]
) -> HalfCell | None:
    if not entries:
        return None
    verdict = find_worst_verdict({entry.verdict: 1 for entry in entries})
    grade = max((entry.grade for entry in entries), default="")
    letter = (grade if verdict is Verdict.PASS else "") or LETTER_BY_VERDICT.get(verdict, "✕")
    first = len(cases)
    cases += [_make_case(entry, detail, report, prefix) for entry in entries for detail in entry.details]
    counts = "; ".join(f"{count} {v}" for entry in entries for v, count in entry.verdicts.items())
    return HalfCell(
        f"{style_of(verdict)} {grade.lower()}".strip(),
        letter,
        f"{', '.join(str(entry.task) for entry in entries)}: {counts or 'no checks'}",
        " ".join(map(str, range(first, len(cases)))),
    )


def _make_case(entry: TaskReport, detail: Detail, report: Report, prefix: str) -> dict[str, Any]:
    """Return the texts that the page shows for a case."""
    found = detail.comparison
    measures = {
        "checks with this verdict": f"{entry.verdicts.get(detail.verdict, 0):,}",
        "error": f"{found.error:.6g}",
        "bound": f"{found.bound:.6g}",
        "error / bound": f"{found.ratio:.4g}",
        "mean error / eager's": f"{found.quality:.4g}, grade {found.grade}",
        "elements": f"{found.elements:,}, {found.ambiguous:,} ambiguous, {found.unstable:,} unstable",
    }
    path = detail.reproducer
    return {
        "verdict": str(detail.verdict),
        "style": style_of(detail.verdict),
        "place": detail.check + f", on the inputs {detail.run}" * bool(detail.run),
        "message": found.message,
        "measures": [list(pair) for pair in measures.items()][: None if found.elements else 1],
        "facts": [list(pair) for pair in detail.facts.items()],
        "listing": detail.listing,
        "reproducer": path,
        "href": "/".join(quote(part) for part in (*prefix.split("/"), *path.split("/"))) if path else "",
        "commands": report.format_commands(path, prefix) if path else "",
    }
