"""Two reports of one target side by side: what got worse, what got better, what came and what went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clika_ref_conformance.cases import Task
from clika_ref_conformance.reporting.report import Report, TaskReport
from clika_ref_conformance.verdicts import Verdict

RAN = frozenset({Verdict.PASS, Verdict.DEVIATION})
"""Verdicts that prove something of the target."""


@dataclass(frozen=True)
class Change:
    """What became of one task from the old report to the new one."""

    task: Task
    text: str

    def __str__(self) -> str:
        return f"{self.task}: {self.text}"


@dataclass(frozen=True)
class Difference:
    """All changes, by kind."""

    regressions: Sequence[Change]
    """Tasks that fail more, or prove less."""
    fixed: Sequence[Change]
    new: Sequence[Change]
    gone: Sequence[Change]

    @property
    def exit_code(self) -> int:
        """1 where something got worse, else 0."""
        return 1 if self.regressions else 0


def difference(old: Report, new: Report) -> Difference:
    """Compare two reports, task by task.

    A task got worse where a failing verdict appears, or occurs more often among as many checks; and where it proved
    something before and now is refused, or not run. Counts of different numbers of checks are not compared.
    """
    before, after = ({entry.task: entry for entry in report.tasks} for report in (old, new))
    shared = [(before[task], entry) for task, entry in after.items() if task in before]
    return Difference(
        [Change(b.task, text) for a, b in shared if (text := _worse(a, b))],
        [Change(b.task, text) for a, b in shared if not _worse(a, b) and (text := _better(a, b))],
        [Change(task, _summary(entry)) for task, entry in after.items() if task not in before],
        [Change(task, f"was {_summary(entry)}") for task, entry in before.items() if task not in after],
    )


def _worse(old: TaskReport, new: TaskReport) -> str:
    counted = sum(old.verdicts.values()) == sum(new.verdicts.values())
    reasons = [
        f"{count} {verdict}, was {old.verdicts.get(verdict, 0)}{_first(new, verdict)}"
        for verdict, count in new.verdicts.items()
        if verdict.is_failure
        and count > (old.verdicts.get(verdict, 0) if counted else count * (verdict in old.verdicts))
    ]
    if not RAN.isdisjoint(old.verdicts) and RAN.isdisjoint(new.verdicts) and not reasons:
        reasons.append(f"proves nothing any more: {_summary(new)}, was {_summary(old)}")
    return "; ".join(reasons)


def _better(old: TaskReport, new: TaskReport) -> str:
    counted = sum(old.verdicts.values()) == sum(new.verdicts.values())
    return "; ".join(
        f"{new.verdicts.get(verdict, 0)} {verdict}, was {count}"
        for verdict, count in old.verdicts.items()
        if verdict.is_failure and (new.verdicts.get(verdict, 0) < count if counted else verdict not in new.verdicts)
    )


def _first(entry: TaskReport, verdict: Verdict) -> str:
    found = next((d for d in entry.details if d.verdict is verdict), None)
    return "" if found is None else f" ({found.check}: {found.comparison.message.partition(chr(10))[0]})"


def _summary(entry: TaskReport) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in entry.verdicts.items()) or "no checks"
