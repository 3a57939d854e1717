"""Content of a report: the accounting of a run, and the worst case of every task and verdict in detail."""

from __future__ import annotations

import posixpath
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref_conformance.cases import Task
from clika_ref_conformance.verdicts import Comparison, Verdict

SEVERITY_BY_VERDICT = {
    verdict: rank
    for rank, verdict in enumerate(
        [
            *(Verdict.NOT_RUN, Verdict.UNSUPPORTED, Verdict.UNSTABLE, Verdict.PASS, Verdict.DEVIATION, Verdict.XFAIL),
            *(Verdict.XPASS, Verdict.SAMPLE, Verdict.CONTRACT, Verdict.UNDECLARED, Verdict.ARTIFACT),
            *(Verdict.NONDETERMINISTIC, Verdict.PRECISION, Verdict.STRUCTURE, Verdict.SPECIAL, Verdict.VALUE),
            *(Verdict.MEMORY, Verdict.HANG, Verdict.CRASH),
        ]
    )
}
"""Severity of verdicts; the highest represents several. One pass is more informative than any number of rejections."""


@dataclass(frozen=True)
class Detail:
    """One case in full: the worst of its task and verdict."""

    check: str
    comparison: Comparison
    run: str = ""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    reproducer: str = ""
    """Zip, relative to the folder of the report."""
    listing: str = ""
    """Graph and its inputs, as text."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the comparison."""
        return self.comparison.verdict


@dataclass(frozen=True)
class TaskReport:
    """Accounting of a task: the number of checks per verdict, and the worst case of each."""

    task: Task
    verdicts: Mapping[Verdict, int]
    details: Sequence[Detail]
    """In order of severity, one for each verdict. The worst pass is the one that used most of its bound."""
    elements: int = 0
    ambiguous: int = 0
    unstable: int = 0
    unstable_finite: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Verdict that represents the task."""
        return find_worst_verdict(self.verdicts)

    @property
    def grade(self) -> str:
        """Worst grade of the passes; empty if nothing was measured."""
        measured = [d.comparison for d in self.details if d.verdict is Verdict.PASS and d.comparison.elements]
        return max((comparison.grade for comparison in measured), default="")


@dataclass(frozen=True)
class UnrunChecks:
    """Checks that were not run, for one kind of reason."""

    count: int
    example: str
    """Message of the first of them."""


@dataclass(frozen=True)
class Report:
    """Report of a whole run, small enough to keep and to compare with the next one."""

    target: str
    profile: str
    seed: int
    environment: Mapping[str, str]
    seconds: float
    planned: int
    tasks: Sequence[TaskReport]
    """In order of the plan."""
    deviations: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()
    part: str = ""
    """Requested part of the profile, as options; empty if all of it was requested."""
    target_folder: str = ""
    """Folder of the module of ``package.module:TARGET``; empty for an installed target."""
    not_run: Mapping[str, UnrunChecks] = field(default_factory=dict[str, "UnrunChecks"])
    """Checks that were not run, by kind of reason, the most frequent first."""

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of checks per verdict, without verdicts that did not occur."""
        total: Counter[Verdict] = Counter()
        for task in self.tasks:
            total.update(task.verdicts)
        return {verdict: total[verdict] for verdict in Verdict if total[verdict]}

    @property
    def failures(self) -> int:
        """Number of failed checks."""
        return sum(count for verdict, count in self.counts.items() if verdict.is_failure)

    def format_commands(self, reproducer: str, prefix: str = ".") -> str:
        """Return the commands that repeat a case.

        Args:
            reproducer: its zip, relative to the folder of the report.
            prefix: path from the commands' working directory to the folder of the report.
        """
        place = posixpath.normpath(posixpath.join(prefix, reproducer))
        path, folder = shlex.quote(place), shlex.quote(place.removesuffix(".zip"))
        home = self.target_folder  # importable from any working directory, in addition to the existing PYTHONPATH
        found = f"PYTHONPATH={shlex.quote(home)}${{PYTHONPATH:+:$PYTHONPATH}} " if home else ""
        option = f" --target {shlex.quote(self.target)}" if ":" in self.target else ""  # a zip must not select code
        return (
            f"{found}clika-ref conformance replay {path}{option}\n"
            "# or without the suite: it needs torch, numpy, clika-ref, and the plugins of the target and the "
            "operators\n"
            f"python -m zipfile -e {path} {folder} && {found}python {folder}/repro.py"
        )

    @property
    def levels(self) -> list[str]:
        """Levels, in order of the plan."""
        return list(dict.fromkeys(entry.task.level for entry in self.tasks))


def find_worst_verdict(verdicts: Mapping[Verdict, int]) -> Verdict:
    """Return the verdict that represents several: the most severe one, or `NOT_RUN` if there are none."""
    return max(
        (verdict for verdict, count in verdicts.items() if count),
        key=SEVERITY_BY_VERDICT.__getitem__,
        default=Verdict.NOT_RUN,
    )
