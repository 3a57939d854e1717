"""The kill rate, which is the share of mutants that the suite finds with each seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from clika_ref.core.errors import ClikaError
from clika_ref.core.registry import load_registry
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Declarations
from clika_ref_conformance.execution.run import Execution, RunPlan, RunRequest, start_execution
from clika_ref_conformance.execution.target_probe import probe_target
from clika_ref_conformance.execution.worker_process import EXIT_STATUS_LABEL, make_run_folder
from clika_ref_conformance.mutants import mutant_runs, replays
from clika_ref_conformance.mutants.catalogue import load_mutants
from clika_ref_conformance.mutants.seeding import Mutant
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.targets.loading import load_target
from clika_ref_conformance.verdicts import Verdict

MUTATION_LEVELS = {module.LEVEL: module.__name__ for module in (mutant_runs, replays)}

MUTANT_TIMEOUT_S = 600.0
"""Time limit of a mutant, which runs many checks; a mutant that exceeds it counts as a hang."""

WORKER_ENDING_VERDICTS = frozenset({Verdict.CRASH, Verdict.HANG})
"""Verdicts of checks that end their worker process."""

SHRINK_SECONDS = 10.0
"""Time limit for the reduction of a failing graph."""


@dataclass(frozen=True)
class MutantResult:
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
class KillReport:
    """The results of all mutants."""

    profile: str
    results: Sequence[MutantResult]
    replayed: Sequence[CheckResult] = field(default=())
    """One result for each reproducer replayed in a fresh process."""

    def count_kills(self, *, seed: int | None = None, blind: bool | None = None) -> tuple[int, int]:
        """Return the number of killed mutants and the number of all, for a seed and for blind or other mutants."""
        chosen = [t for t in self.results if seed in (None, t.seed) and blind in (None, t.blind)]
        return sum(t.is_killed for t in chosen), len(chosen)

    @property
    def seeds(self) -> list[int]:
        """The seeds, sorted."""
        return sorted({t.seed for t in self.results})

    def compute_median_nodes(self, *, of_pass: bool) -> float | None:
        """Return the median size of reduced failing graphs, for mutants of passes or of operators."""
        counts = [t.nodes for t in self.results if t.nodes is not None and t.task.startswith("passes") == of_pass]
        return statistics.median(counts) if counts else None

    @property
    def failed_replays(self) -> list[CheckResult]:
        """Replays without the same failure; if a mutant ended its worker, its replay must do so, too."""
        ended = {result.mutant for result in self.results if result.verdict in WORKER_ENDING_VERDICTS}
        return [
            r
            for r in self.replayed
            if r.verdict is not Verdict.PASS and not (r.verdict in WORKER_ENDING_VERDICTS and r.task.subject in ended)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        rates = {
            str(seed): {name: self.count_kills(seed=seed, blind=blind) for name, blind in MUTANT_GROUPS.items()}
            for seed in self.seeds
        }
        medians = {
            "operators": self.compute_median_nodes(of_pass=False),
            "passes": self.compute_median_nodes(of_pass=True),
        }
        replayed = [len(self.replayed) - len(self.failed_replays), len(self.replayed)]
        results = [asdict(result) for result in self.results]
        return {"profile": self.profile, "rates": rates, "nodes": medians, "replayed": replayed, "results": results}


MUTANT_GROUPS: dict[str, bool | None] = {"all": None, "blind": True, "own": False}
"""Groups of mutants for kill rates, and the matching value of ``blind``."""


def select_mutants(words: Sequence[str]) -> list[Mutant]:
    """Return the mutants with one of some words in their name or change; all mutants without words.

    Raises:
        ClikaError: no mutant matches.
    """
    every = load_mutants().values()
    found = [m for m in every if not words or any(word in m.name or word in m.change for word in words)]
    if not found:
        prefixes = ", ".join(sorted({name.split("-")[0] for name in load_mutants()}))
        raise ClikaError(f"no mutant contains {' or '.join(words)}; their names begin with {prefixes}")
    return found


def run_mutants(
    chosen: Sequence[Mutant],
    *,
    target: str = "onnxruntime",
    profile: str = "quick",
    seeds: Sequence[int] = (0,),
    workers: int = 2,
    notice: Callable[[MutantResult], None] | None = None,
) -> KillReport:
    """Run the suite on mutants with each seed, reduce the failures of the first seed, and replay their reproducers.

    Raises:
        ClikaError: there is no such target or profile, or no worker can start.
    """
    probe_target(target)
    load_target(target, load_registry())
    found: list[MutantResult] = []
    with make_run_folder() as folder:
        for seed in seeds:
            first = seed == seeds[0]
            request = _make_request(target, profile, SHRINK_SECONDS if first else 0.0, workers)
            planned = [mutant_runs.task_of(mutant, seed) for mutant in chosen]
            results = _execute_tasks(
                request, planned, folder if first else "", lambda r: notice and notice(_to_mutant_result(r))
            )
            found += [_to_mutant_result(result) for result in results]
        zips = {result.reproducer: result.mutant for result in found if result.reproducer}
        replayed = [Task(replays.LEVEL, mutant, path) for path, mutant in zips.items()]
        again = (
            _execute_tasks(_make_request(target, profile, 0.0, workers), replayed, "", lambda _: None)
            if replayed
            else []
        )
    return KillReport(profile, found, tuple(again))


def _make_request(target: str, profile: str, shrink_seconds: float, workers: int) -> RunRequest:
    chosen = replace(select_profile(profile, 0), shrink_seconds=shrink_seconds, case_seconds=MUTANT_TIMEOUT_S)
    return RunRequest(target, chosen, workers=workers, available_levels=MUTATION_LEVELS)


def _execute_tasks(
    request: RunRequest, tasks: Sequence[Task], folder: str, notice: Callable[[CheckResult], Any]
) -> list[CheckResult]:
    """Run tasks in workers, which a task may crash, and return the results in order."""
    plan = RunPlan(replace(request, argument=folder), MUTATION_LEVELS, tasks, Declarations((), ()))

    def handle_result(result: CheckResult | None, _: Execution) -> None:
        if result is not None:
            _raise_on_suite_failure(result)
            notice(result)

    with start_execution(plan, tasks, handle_result) as execution:
        execution.run()
        if execution.inconclusive_reasons:
            raise ClikaError(execution.inconclusive_reasons[0])
        return [result for task in tasks for result in execution.progress_by_task[task].results.values()]


def _raise_on_suite_failure(result: CheckResult) -> None:
    """Reject a result that is an error of the suite itself.

    A mutant's own exception in a worker does not end it with an exit status.

    Raises:
        ClikaError: the suite failed.
    """
    if result.verdict is Verdict.CRASH and EXIT_STATUS_LABEL in result.comparison.message:
        raise ClikaError(
            f"the suite itself failed on {result.task}, so that nothing is known of it: {result.comparison.message}"
        )


def _to_mutant_result(result: CheckResult) -> MutantResult:
    """Convert a task result; its facts are text."""
    mutant, facts = load_mutants()[result.task.subject], result.facts
    return MutantResult(
        mutant.name,
        mutant.subject,
        mutant.change,
        mutant.blind,
        int(result.task.dtype.removeprefix(mutant_runs.SEED_PREFIX)),
        result.verdict,
        facts.get("task", ""),
        facts.get("check", ""),
        int(facts.get("checks", 0)),
        float(facts.get("seconds", 0.0)),
        int(facts["nodes"]) if "nodes" in facts else None,
        facts.get("reproducer", ""),
        result.comparison.message,
    )
