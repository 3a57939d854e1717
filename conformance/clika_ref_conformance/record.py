"""Record of a run: its environment, its plan and one result for every planned check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref_conformance.cases import Outcome, Task
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict


@dataclass(frozen=True)
class CheckResult:
    """`Outcome` as sent by its worker: without tensors, JSON-serializable."""

    task: Task
    name: str
    """Name of the check, unique within its task."""
    comparison: Comparison
    run: str = ""
    """Inputs that decided."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Attributes and shapes of the case that decided, as text."""
    deviations: tuple[str, ...] = ()
    applicable: tuple[str, ...] = ()
    seconds: float = 0.0
    reproducer: str = ""
    """Path of the zip relative to the folder of the report, with ``/``; empty if there is none."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the check."""
        return self.comparison.verdict

    @property
    def is_abandoned(self) -> bool:
        """Whether the run, or its attempts at the task, ended before this check; such a result proves nothing."""
        return self.comparison.reason == Reason.ABANDONED

    @property
    def is_skipped_after_failures(self) -> bool:
        """Whether the check was skipped because its task had failed often enough."""
        return self.comparison.reason == Reason.ENOUGH_FAILURES

    @classmethod
    def of(cls, task: Task, outcome: Outcome, reproducer: str = "") -> CheckResult:
        """Return the result of an outcome, with facts converted to text."""
        facts = {} if outcome.case is None else {k: str(v) for k, v in outcome.case.facts.items()}
        return cls(
            task,
            outcome.name,
            outcome.comparison,
            outcome.run,
            facts,
            tuple(outcome.deviations),
            tuple(outcome.applicable),
            outcome.seconds,
            reproducer,
        )


@dataclass(frozen=True)
class RunRecord:
    """Record of a whole run, and the only input of reports."""

    target: str
    profile: str
    seed: int
    environment: Mapping[str, str]
    """Versions, processor, limits, and environment variables that affect numerics."""
    plan: Mapping[Task, Sequence[str]]
    """Names of the checks of every task, known before the task ran."""
    results: Sequence[CheckResult]
    """Results in the order of the plan."""
    seconds: float = 0.0
    deviations: Sequence[Mapping[str, Any]] = ()
    """Each declared deviation: ``id``, ``reason``, ``link``, and counts of checks, ``occurred`` and ``applicable``."""
    problems: Sequence[str] = ()
    """Problems of the run as a whole, such as deviations that match nothing or no longer occur. Each fails the run."""
    inconclusive_reasons: Sequence[str] = ()
    """Reasons why the run is inconclusive: its own references are wrong, or no check passed."""
    is_abandoned: bool = False
    """Whether the run ended before all of its tasks had."""
    part: str = ""
    """Requested part of the profile, as options (``-k softmax``); empty if all of it was requested."""
    target_folder: str = ""
    """Folder of the module of ``package.module:TARGET``; empty for an installed target."""

    @property
    def planned(self) -> int:
        """Number of planned checks."""
        return sum(map(len, self.plan.values()))

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of checks per verdict, without verdicts that did not occur."""
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def failures(self) -> list[CheckResult]:
        """Results that fail the run."""
        return [result for result in self.results if result.verdict.is_failure]

    def find_accounting_errors(self) -> list[str]:
        """Return the accounting errors: each planned check must have exactly one result, and no other check any."""
        planned = Counter((task, name) for task, names in self.plan.items() for name in names)
        found = Counter((result.task, result.name) for result in self.results)
        return [
            f"{task}: {name}: planned {planned[task, name]} times, {found[task, name]} results"
            for task, name in {**planned, **found}
            if planned[task, name] != 1 or found[task, name] != 1
        ]

    @property
    def exit_code(self) -> int:
        """0 if all is fine, 1 if something failed, 3 if the run is inconclusive (2 is reserved for wrong usage)."""
        if self.inconclusive_reasons or self.find_accounting_errors():
            return 3
        return 1 if self.failures or self.problems else 0
