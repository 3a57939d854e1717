"""The kill rate, which is the share of mutants that the suite finds with each seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from clika_ref.core.errors import ClikaError
from clika_ref.core.registry import load_registry
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Declarations
from clika_ref_conformance.execution.endings import EXIT_STATUS
from clika_ref_conformance.execution.process import folder_for
from clika_ref_conformance.execution.run import Execution, Plan, RunRequest, execution
from clika_ref_conformance.execution.trying import try_target
from clika_ref_conformance.mutants import replays, trials
from clika_ref_conformance.mutants.catalogue import mutants
from clika_ref_conformance.mutants.seeding import Mutant
from clika_ref_conformance.profiles import chosen_profile
from clika_ref_conformance.record import Result
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Verdict

LEVELS = {module.LEVEL: module.__name__ for module in (trials, replays)}

TRIAL_SECONDS = 600.0
"""Time limit of a trial, which runs many checks; a mutant that exceeds it counts as a hang."""

ENDED = frozenset({Verdict.CRASH, Verdict.HANG})
"""Verdicts of checks that end their worker process."""

SHRINK_SECONDS = 10.0
"""Time limit for the reduction of a failing graph."""


@dataclass(frozen=True)
class Trial:
    """The result of one mutant with one seed."""

    mutant: str
    subject: str
    change: str
    blind: bool
    seed: int
    verdict: Verdict
    """Verdict of the check that found it, ``crash`` or ``hang`` if it ended the worker, ``pass`` if it survived."""
    task: str = ""
    check: str = ""
    checks: int = 0
    """Number of checks that were run; the last one found the mutant."""
    seconds: float = 0.0
    nodes: int | None = None
    """Number of nodes of the reduced failing graph; None without a reduction."""
    reproducer: str = ""
    message: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether the suite found the mutant."""
        return self.verdict.is_failure


@dataclass(frozen=True)
class Killing:
    """The results of all mutants."""

    profile: str
    trials: Sequence[Trial]
    replayed: Sequence[Result] = field(default=())
    """One result for each reproducer replayed in a fresh process."""

    def rate(self, *, seed: int | None = None, blind: bool | None = None) -> tuple[int, int]:
        """Return the number of killed mutants and the number of all, for a seed and for blind or other mutants."""
        chosen = [t for t in self.trials if seed in (None, t.seed) and blind in (None, t.blind)]
        return sum(t.is_killed for t in chosen), len(chosen)

    @property
    def seeds(self) -> list[int]:
        """The seeds, sorted."""
        return sorted({t.seed for t in self.trials})

    def nodes(self, *, of_pass: bool) -> float | None:
        """Return the median size of reduced failing graphs, for mutants of passes or of operators."""
        counts = [t.nodes for t in self.trials if t.nodes is not None and t.task.startswith("passes") == of_pass]
        return statistics.median(counts) if counts else None

    @property
    def failed_replays(self) -> list[Result]:
        """Replays without the same failure; if a trial ended its worker, its replay must do so, too."""
        ended = {trial.mutant for trial in self.trials if trial.verdict in ENDED}
        return [
            r
            for r in self.replayed
            if r.verdict is not Verdict.PASS and not (r.verdict in ENDED and r.task.subject in ended)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        rates = {
            str(seed): {name: self.rate(seed=seed, blind=blind) for name, blind in SORTS.items()} for seed in self.seeds
        }
        medians = {"operators": self.nodes(of_pass=False), "passes": self.nodes(of_pass=True)}
        replayed = [len(self.replayed) - len(self.failed_replays), len(self.replayed)]
        trials = [asdict(trial) for trial in self.trials]
        return {"profile": self.profile, "rates": rates, "nodes": medians, "replayed": replayed, "trials": trials}


SORTS: dict[str, bool | None] = {"all": None, "blind": True, "own": False}
"""Groups of mutants for kill rates, and the matching value of ``blind``."""

Notice = Callable[[Trial], None]


def chosen_mutants(words: Sequence[str]) -> list[Mutant]:
    """Return the mutants with one of some words in their name or change; all mutants without words.

    Raises:
        ClikaError: no mutant matches.
    """
    every = mutants().values()
    found = [m for m in every if not words or any(word in m.name or word in m.change for word in words)]
    if not found:
        msg = f"no mutant contains {' or '.join(words)}; their names begin with {', '.join(sorted(_files()))}"
        raise ClikaError(msg)
    return found


def _files() -> set[str]:
    return {name.split("-")[0] for name in mutants()}


def kill(
    chosen: Sequence[Mutant],
    *,
    target: str = "onnxruntime",
    profile: str = "quick",
    seeds: Sequence[int] = (0,),
    workers: int = 2,
    notice: Notice | None = None,
) -> Killing:
    """Run the suite on mutants with each seed, reduce the failures of the first seed, and replay their reproducers.

    Raises:
        ClikaError: there is no such target or profile, or no worker can start.
    """
    try_target(target)
    load_target(target, load_registry())
    found: list[Trial] = []
    with folder_for() as folder:
        for seed in seeds:
            first = seed == seeds[0]
            request = _request(target, profile, SHRINK_SECONDS if first else 0.0, workers)
            planned = [trials.task_of(mutant, seed) for mutant in chosen]
            results = _executed(request, planned, folder if first else "", lambda r: notice and notice(_trial(r)))
            found += [_trial(result) for result in results]
        zips = {trial.reproducer: trial.mutant for trial in found if trial.reproducer}
        replayed = [Task(replays.LEVEL, mutant, path) for path, mutant in zips.items()]
        again = _executed(_request(target, profile, 0.0, workers), replayed, "", lambda _: None) if replayed else []
    return Killing(profile, found, tuple(again))


def _request(target: str, profile: str, shrink_seconds: float, workers: int) -> RunRequest:
    chosen = replace(chosen_profile(profile, 0), shrink_seconds=shrink_seconds, case_seconds=TRIAL_SECONDS)
    return RunRequest(target, chosen, workers=workers, catalogue=LEVELS)


def _executed(request: RunRequest, tasks: Sequence[Task], folder: str, notice: Callable[[Result], Any]) -> list[Result]:
    """Run tasks in workers, which a task may crash, and return the results in order."""
    plan = Plan(replace(request, argument=folder), LEVELS, tasks, Declarations((), ()))

    def each(result: Result | None, _: Execution) -> None:
        if result is not None:
            _require_sound(result)
            notice(result)

    with execution(plan, tasks, each) as running:
        running.go()
        if running.doubts:
            raise ClikaError(running.doubts[0])
        return list(_in_order(running, tasks))


def _require_sound(result: Result) -> None:
    """Reject a result that is an error of the suite itself.

    A mutant's own exception in a worker does not end it with an exit status.

    Raises:
        ClikaError: the suite failed.
    """
    if result.verdict is Verdict.CRASH and EXIT_STATUS in result.comparison.message:
        msg = f"the suite itself failed on {result.task}, so that nothing is known of it: {result.comparison.message}"
        raise ClikaError(msg)


def _in_order(running: Execution, tasks: Iterable[Task]) -> Iterable[Result]:
    for task in tasks:
        yield from running.every[task].results.values()


def _trial(result: Result) -> Trial:
    """Convert a task result; its facts are text."""
    mutant, facts = mutants()[result.task.subject], result.facts
    return Trial(
        mutant.name,
        mutant.subject,
        mutant.change,
        mutant.blind,
        int(result.task.dtype.removeprefix(trials.SEED)),
        result.verdict,
        facts.get("task", ""),
        facts.get("check", ""),
        int(facts.get("checks", 0)),
        float(facts.get("seconds", 0.0)),
        int(facts["nodes"]) if "nodes" in facts else None,
        facts.get("reproducer", ""),
        result.comparison.message,
    )
