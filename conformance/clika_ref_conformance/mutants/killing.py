"""Which mutants the suite finds, seed by seed: the kill rate that says how good the suite itself is."""

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
"""After so long a mutant is taken to hang: its trial is many checks, of which each would have less."""

ENDED = frozenset({Verdict.CRASH, Verdict.HANG})
"""Verdicts of what ends the process that it runs in."""

SHRINK_SECONDS = 10.0
"""Given to the reduction of a failing graph."""


@dataclass(frozen=True)
class Trial:
    """What became of one mutant with one seed."""

    mutant: str
    subject: str
    change: str
    blind: bool
    seed: int
    verdict: Verdict
    """Of the check that found it, ``crash`` or ``hang`` where it ended the worker, ``pass`` where nothing found it."""
    task: str = ""
    check: str = ""
    checks: int = 0
    """How many checks were run, the last of which found it."""
    seconds: float = 0.0
    nodes: int | None = None
    """Of the reduced failing graph; None where none was asked for."""
    reproducer: str = ""
    message: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether the suite found it."""
        return self.verdict.is_failure


@dataclass(frozen=True)
class Killing:
    """What became of all of them."""

    profile: str
    trials: Sequence[Trial]
    replayed: Sequence[Result] = field(default=())
    """One for each reproducer that was replayed in a fresh process."""

    def rate(self, *, seed: int | None = None, blind: bool | None = None) -> tuple[int, int]:
        """Return how many were killed, and of how many, of a seed and a sort."""
        chosen = [t for t in self.trials if seed in (None, t.seed) and blind in (None, t.blind)]
        return sum(t.is_killed for t in chosen), len(chosen)

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return sorted({t.seed for t in self.trials})

    def nodes(self, *, of_pass: bool) -> float | None:
        """Return the median number of nodes of reduced failing graphs, of pass mutants or of operator mutants."""
        counts = [t.nodes for t in self.trials if t.nodes is not None and t.task.startswith("passes") == of_pass]
        return statistics.median(counts) if counts else None

    @property
    def failed_replays(self) -> list[Result]:
        """The reproducers that did not fail again; one of a trial that ended its worker ends it again."""
        ended = {trial.mutant for trial in self.trials if trial.verdict in ENDED}
        return [
            r
            for r in self.replayed
            if r.verdict is not Verdict.PASS and not (r.verdict in ENDED and r.task.subject in ended)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        rates = {
            str(seed): {name: self.rate(seed=seed, blind=blind) for name, blind in SORTS.items()} for seed in self.seeds
        }
        medians = {"operators": self.nodes(of_pass=False), "passes": self.nodes(of_pass=True)}
        replayed = [len(self.replayed) - len(self.failed_replays), len(self.replayed)]
        trials = [asdict(trial) for trial in self.trials]
        return {"profile": self.profile, "rates": rates, "nodes": medians, "replayed": replayed, "trials": trials}


SORTS: dict[str, bool | None] = {"all": None, "blind": True, "own": False}
"""Kill rates that are given, and whether their mutants are blind."""

Notice = Callable[[Trial], None]


def chosen_mutants(words: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose name or change contains one of some words, or all.

    Raises:
        ClikaError: there is none.
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
    """Try mutants with each seed, reduce what failed with the first one, and replay what it left.

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
    """Run tasks in workers, each of which may die of one, and return their results in order."""
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
    """Refuse a result that is the suite's own fault: what a mutant raises in a worker does not end it with a status.

    Raises:
        ClikaError: it is.
    """
    if result.verdict is Verdict.CRASH and EXIT_STATUS in result.comparison.message:
        msg = f"the suite itself failed on {result.task}, so that nothing is known of it: {result.comparison.message}"
        raise ClikaError(msg)


def _in_order(running: Execution, tasks: Iterable[Task]) -> Iterable[Result]:
    for task in tasks:
        yield from running.every[task].results.values()


def _trial(result: Result) -> Trial:
    """Return what a result of a trial says; numbers come as text, as all facts do."""
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
