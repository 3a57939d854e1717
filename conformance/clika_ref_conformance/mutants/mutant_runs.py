"""The level that seeds mutants; a check seeds one mutant, and fails if the suite finds it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from clika_ref.core.errors import PluginError
from clika_ref.core.ir import Graph
from clika_ref_conformance.cases import Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.motifs.hosts import embed_motif
from clika_ref_conformance.drawing.reducing.graphs import reduce_case
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.check_runner import plan_checks, run_check
from clika_ref_conformance.execution.levels import LEVELS, import_level
from clika_ref_conformance.mutants.catalogue import load_mutants
from clika_ref_conformance.mutants.seeding import Mutant
from clika_ref_conformance.reproducing.reproducers import write_reproducer
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "mutants"
KILL_CHECK = "kill"

MAX_HOST_GRAPHS = 12
"""Maximum number of random graphs to insert a failing call into, until one of them fails."""

SEED_PREFIX = "seed-"

CHECK_TIMEOUT_S = 50.0
"""Time limit of a check with a seeded mutant; it then counts as a hang, and the worker continues."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each mutant, with the seed of the profile."""
    return [task_of(mutant, suite.profile.seed) for mutant in load_mutants().values()]


def task_of(mutant: Mutant, seed: int) -> Task:
    """Return the task of a mutant and a seed, which is stored as the dtype of the task."""
    return Task(LEVEL, mutant.name, f"{SEED_PREFIX}{seed}")


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the one check of a mutant."""
    mutant, seed = load_mutants()[task.subject], int(task.dtype.removeprefix(SEED_PREFIX))
    trial = MutantRun(mutant, replace(suite, profile=replace(suite.profile, seed=seed)))
    return [Check(KILL_CHECK, trial.run)]


def find_tasks(mutant: Mutant, suite: Suite) -> Iterator[Task]:
    """Yield the tasks that may find a mutant.

    Tasks of its own levels come first: those of its subject, or all tasks if the subject has none. Tasks of its subject
    at other levels follow.
    """
    for name in mutant.levels:
        every = import_level(LEVELS[name]).tasks(suite)
        yield from [task for task in every if task.subject == mutant.subject] or every
    for name in (name for name in LEVELS if name not in mutant.levels):
        yield from (
            task for task in import_level(LEVELS[name]).tasks(suite) if mutant.subject in task.subject.split("+")
        )


@dataclass
class MutantRun:
    """A run of the suite on one mutant."""

    mutant: Mutant
    suite: Suite
    number: int = 0
    """Number of checks run so far with the mutant seeded."""

    def run(self) -> Outcome:
        """Run the checks of the mutant until one fails that passes without it."""
        start = time.perf_counter()
        found = next((f for task in find_tasks(self.mutant, self.suite) if (f := self._find_failure(task))), None)
        seconds = time.perf_counter() - start
        if found is None:
            facts = {"checks": self.number, "seconds": seconds}
            return Outcome(KILL_CHECK, Comparison(Verdict.PASS, "nothing found it"), case=_make_facts_case(facts))
        task, outcome = found
        facts = {
            "task": task,
            "check": outcome.name,
            "checks": self.number,
            "seconds": seconds,
            "reproducer": "" if outcome.verdict is Verdict.HANG else self._write_reproducer(task, outcome),
            "nodes": self._count_nodes(task, outcome),
        }
        return replace(outcome, name=KILL_CHECK, case=_make_facts_case(facts))

    def _find_failure(self, task: Task) -> tuple[Task, Outcome] | None:
        """Return the first failure of a task that is caused by the mutant."""
        with self.mutant.activate(self.suite.registry):
            planned = plan_checks(task, self.suite)
        clean: Mapping[str, Check] | None = None
        for check in planned:
            self.number += 1
            with self.mutant.activate(self.suite.registry):
                outcome = _run_with_timeout(CHECK_TIMEOUT_S, check)
            if not outcome.verdict.is_failure or _is_lowering_error(outcome):
                continue
            if clean is None:
                clean = {check.name: check for check in plan_checks(task, self.suite)}
            if not _fails_anyway(clean.get(outcome.name), outcome):
                return task, outcome
        return None

    def _write_reproducer(self, task: Task, outcome: Outcome) -> str:
        """Write the reproducer of a failure if the run asks for it, and return its path."""
        folder = str(self.suite.setup.get("argument", ""))
        if not folder:
            return ""
        with self.mutant.activate(self.suite.registry):
            try:
                path = write_reproducer(outcome, task, self.suite, self.suite.setup["target"], Path(folder))
            except Exception as error:  # noqa: BLE001 - it counts as one that does not replay
                return f"{type(error).__name__}: {error}"
        return str(Path(folder) / path)

    def _count_nodes(self, task: Task, outcome: Outcome) -> int | None:
        """Return the size of the reduced failing graph: of a pass, or around a call of an operator."""
        if outcome.case is None or not self.suite.profile.shrink_seconds:
            return None
        if task.level == "passes":
            return len(list(outcome.case.graph.nodes))
        if task.level != "operators":
            return None
        with self.mutant.activate(self.suite.registry):
            return self._reduce_in_host(outcome.case)

    def _reduce_in_host(self, case: GraphCase) -> int | None:
        """Insert a failing call into random graphs until one fails, and return the size of its reduction."""
        operators = {n: op for n, op in self.suite.registry.operators.items() if op.sampler and not op.random}
        for turn in range(MAX_HOST_GRAPHS):
            larger = embed_motif(Random(f"{self.mutant.name}-{turn}"), case, operators, ())  # noqa: S311 - no secret
            verdict = None if larger is None else run_case(larger, self.suite).verdict
            if larger is not None and verdict is not None and verdict.is_failure:

                def fails(smaller: GraphCase, wanted: Verdict = verdict) -> bool:
                    return run_case(smaller, self.suite).verdict is wanted

                small = reduce_case(larger, fails, self.suite.profile.shrink_seconds)
                return len(list(small.graph.nodes))
        return None


SIGNAL_INTERVAL_S = 5.0
"""Interval for repeating the timeout signal: Python drops an exception raised within a finalizer."""


class _CheckTimeout(BaseException):
    """A check exceeds its time limit; not an ``Exception``, so that it is not reported as a failure of a pass."""


def _run_with_timeout(seconds: float, check: Check) -> Outcome:
    """Run a check with a time limit, and return a hang if it exceeds the limit."""
    running = True

    def end(*_: object) -> None:
        if running:
            raise _CheckTimeout

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, SIGNAL_INTERVAL_S)
    try:
        try:
            return run_check(check)
        finally:
            running = False
    except _CheckTimeout:
        return Outcome(check.name, Comparison(Verdict.HANG, f"it did not end within {seconds:g} s"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops a pending signal, which would end the process
        signal.signal(signal.SIGALRM, before)


def _fails_anyway(clean: Check | None, outcome: Outcome) -> bool:
    """Return whether a check fails without the mutant, too, in the same way and on the same inputs."""
    if clean is None:
        return False
    found = run_check(clean)
    return found.verdict is outcome.verdict and found.run == outcome.run


def _is_lowering_error(outcome: Outcome) -> bool:
    """Return whether the mutant raised during lowering, which shows nothing about the suite."""
    return PluginError.__name__ in outcome.comparison.message


def _make_facts_case(facts: dict[str, object]) -> GraphCase:
    """Return a case with an empty graph that passes facts to the run."""
    return GraphCase(
        KILL_CHECK, Graph(KILL_CHECK), (), {name: fact for name, fact in facts.items() if fact not in (None, "")}
    )
