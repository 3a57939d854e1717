"""What a report says: the accounts of a run, and of every task and verdict the worst case in detail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref_conformance.cases import Task
from clika_ref_conformance.verdicts import Comparison, Verdict

SEVERITY = {
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
"""Which verdict stands for several: the highest. One check that passed says more than any that were refused."""


@dataclass(frozen=True)
class Detail:
    """One case in full: the worst of its task and verdict."""

    check: str
    comparison: Comparison
    run: str = ""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    reproducer: str = ""
    """The zip, relative to the folder of the report."""
    listing: str = ""
    """The graph and its inputs, as text."""

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        return self.comparison.verdict


@dataclass(frozen=True)
class TaskReport:
    """The accounts of a task: how many checks ended with which verdict, and the worst of each."""

    task: Task
    verdicts: Mapping[Verdict, int]
    details: Sequence[Detail]
    """In order of severity, one for each verdict; passes among them, by how much of the bound they used."""
    elements: int = 0
    ambiguous: int = 0
    unstable: int = 0
    strayed: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict that stands for the task."""
        return worst(self.verdicts)

    @property
    def grade(self) -> str:
        """The worst grade of what passed; empty where nothing was measured."""
        measured = [d.comparison for d in self.details if d.verdict is Verdict.PASS and d.comparison.elements]
        return max((comparison.grade for comparison in measured), default="")


@dataclass(frozen=True)
class Unrun:
    """The checks that were not run for one kind of reason."""

    count: int
    example: str
    """What was said of the first of them."""


@dataclass(frozen=True)
class Report:
    """A whole run, small enough to keep and to compare with the next one."""

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
    """What of the profile was asked for, as options; empty where all of it was."""
    target_folder: str = ""
    """Where the module of ``package.module:TARGET`` was found; empty where a target is installed."""
    not_run: Mapping[str, Unrun] = field(default_factory=dict[str, "Unrun"])
    """How many checks were not run, by kind of reason, those with most first."""

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many checks ended with each verdict; verdicts that did not occur are left out."""
        total: Counter[Verdict] = Counter()
        for task in self.tasks:
            total.update(task.verdicts)
        return {verdict: total[verdict] for verdict in Verdict if total[verdict]}

    @property
    def failures(self) -> int:
        """How many checks failed."""
        return sum(count for verdict, count in self.counts.items() if verdict.is_failure)

    @property
    def levels(self) -> list[str]:
        """The levels, in order of the plan."""
        return list(dict.fromkeys(entry.task.level for entry in self.tasks))


def worst(verdicts: Mapping[Verdict, int]) -> Verdict:
    """Return the verdict that stands for several; of none at all, that nothing was run."""
    return max(
        (verdict for verdict, count in verdicts.items() if count), key=SEVERITY.__getitem__, default=Verdict.NOT_RUN
    )
