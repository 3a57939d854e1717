"""Group the failures of a task by verdict and by the expected failures that cover the check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import ExpectedFailure
from clika_ref_conformance.verdicts import Verdict

FailureKind = tuple[Verdict, tuple[ExpectedFailure, ...]]
"""Verdict, and the expected failures that cover the check; none if its failure is unexpected."""


class TaskFailures:
    """Count the failures of a task by kind: expected failures predict nothing about checks that should pass."""

    def __init__(self, task: Task, xfails: Sequence[ExpectedFailure], done: Mapping[str, Verdict]) -> None:
        """Start with the verdicts of checks that other processes have run."""
        self.task = task
        self.xfails = tuple(entry for entry in xfails if entry.matches_task(task))
        self.counts: Counter[FailureKind] = Counter()
        for check, verdict in done.items():
            self.add(check, verdict)

    def add(self, check: str, verdict: Verdict) -> bool:
        """Count the verdict of a check, and return whether it is the first failure of its kind."""
        kind = verdict, self._find_covering(check)
        self.counts[kind] += verdict.is_failure
        return self.counts[kind] == 1 and verdict.is_failure

    def most_frequent(self, check: str) -> tuple[Verdict, int]:
        """Return the most frequent kind of failure among those that predict the result of a check, and its count."""
        predictive = {(), self._find_covering(check)}
        counts = [(verdict, count) for (verdict, covering), count in self.counts.items() if covering in predictive]
        return max(counts, key=lambda item: item[1], default=(Verdict.PASS, 0))

    def _find_covering(self, check: str) -> tuple[ExpectedFailure, ...]:
        return tuple(entry for entry in self.xfails if entry.concerns(self.task, check))
