"""What a run leaves: its environment, its plan, one result for every planned check, and whether the accounts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref_conformance.cases import Outcome, Task
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict


@dataclass(frozen=True)
class Result:
    """An `Outcome` as it leaves its worker: without tensors, and made of what JSON can hold."""

    task: Task
    name: str
    """The name of the check, unique within its task."""
    comparison: Comparison
    run: str = ""
    """The inputs that decided."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Attributes and shapes of the case that decided, as text."""
    deviations: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    seconds: float = 0.0
    reproducer: str = ""
    """The path of the zip relative to the folder of the report, with ``/``; empty where there is none."""

    @property
    def verdict(self) -> Verdict:
        """What became of the check."""
        return self.comparison.verdict

    @property
    def is_given_up(self) -> bool:
        """Whether the run, or what it tried of the task, had ended before: nothing follows from it."""
        return self.comparison.reason == Reason.GIVEN_UP

    @property
    def is_of_too_many(self) -> bool:
        """Whether it was not run, as its task had failed often enough."""
        return self.comparison.reason == Reason.ENOUGH_FAILURES

    @classmethod
    def of(cls, task: Task, outcome: Outcome, reproducer: str = "") -> Result:
        """Return the result of an outcome; facts are written out."""
        facts = {} if outcome.case is None else {k: str(v) for k, v in outcome.case.facts.items()}
        return cls(
            task,
            outcome.name,
            outcome.comparison,
            outcome.run,
            facts,
            tuple(outcome.deviations),
            tuple(outcome.watched),
            outcome.seconds,
            reproducer,
        )


@dataclass(frozen=True)
class RunRecord:
    """A whole run. Reports are written from it, and from nothing else."""

    target: str
    profile: str
    seed: int
    environment: Mapping[str, str]
    """Versions, processor, limits, variables that change numbers."""
    plan: Mapping[Task, Sequence[str]]
    """The names of the checks of every task, known before the task ran."""
    results: Sequence[Result]
    """In order of the plan."""
    seconds: float = 0.0
    deviations: Sequence[Mapping[str, Any]] = ()
    """Each declared deviation: ``id``, ``reason``, ``link``, and how often it was ``seen`` and ``watched``."""
    problems: Sequence[str] = ()
    """What is wrong with the run as a whole: deviations that match nothing, or are gone. Each fails the run."""
    doubts: Sequence[str] = ()
    """Why the run proves too little, whatever it found: its own references are off, or nothing was proven."""
    is_given_up: bool = False
    """Whether it ended before all of its tasks had."""
    part: str = ""
    """What of the profile was asked for, as options (``-k softmax``); empty where all of it was."""
    target_folder: str = ""
    """Where the module of ``package.module:TARGET`` was found; empty where a target is installed."""

    @property
    def planned(self) -> int:
        """The number of planned checks."""
        return sum(map(len, self.plan.values()))

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many checks ended with each verdict; verdicts that did not occur are left out."""
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def failures(self) -> list[Result]:
        """The results that fail the run."""
        return [result for result in self.results if result.verdict.is_failure]

    def imbalance(self) -> list[str]:
        """Return what is wrong with the accounts: every planned check has one result, and no other has any."""
        planned = Counter((task, name) for task, names in self.plan.items() for name in names)
        found = Counter((result.task, result.name) for result in self.results)
        return [
            f"{task}: {name}: planned {planned[task, name]} times, {found[task, name]} results"
            for task, name in {**planned, **found}
            if planned[task, name] != 1 or found[task, name] != 1
        ]

    @property
    def exit_code(self) -> int:
        """0 all is fine, 1 something failed, 3 the run proves too little (2 is left to wrong usage)."""
        if self.doubts or self.imbalance():
            return 3
        return 1 if self.failures or self.problems else 0
