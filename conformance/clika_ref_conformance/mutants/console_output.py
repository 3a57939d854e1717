"""Console output for mutation testing: one line per mutant as it finishes, then the kill rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from clika_ref.core.errors import ClikaError
from clika_ref.reporting.console import format_duration, result_console
from clika_ref_conformance.execution.run import RunRequest, execute_plan, plan_run
from clika_ref_conformance.mutants.kill_rate import MUTANT_GROUPS, KillReport, MutantResult, run_mutants, select_mutants
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import RunRecord

MIN_KILL_RATES = {"quick": 0.97, "ci": 1.0, "nightly": 1.0}
"""Minimum kill rate of a profile with each seed."""


def run_mutants_and_show(
    words: Sequence[str], *, target: str, profile: str, seeds: int, workers: int, json_file: Path | None
) -> int:
    """Run mutants, print the results, and return the exit status: 1 if a seed kills too few, else 0."""
    console = result_console()
    chosen = select_mutants(words)
    killing = run_mutants(
        chosen,
        target=target,
        profile=profile,
        seeds=range(seeds),
        workers=workers,
        notice=lambda trial: show_result(trial, console),
    )
    if json_file is not None:
        json_file.write_text(json.dumps(killing.as_json(), indent=1), encoding="utf-8")
    show_rates(killing, console)
    return 0 if has_enough_kills(killing) else 1


def has_enough_kills(killing: KillReport) -> bool:
    """Return whether each seed reaches the kill rate of the profile and every reproducer fails again."""
    rates = [killing.count_kills(seed=seed) for seed in killing.seeds]
    return all(n >= MIN_KILL_RATES[killing.profile] * of for n, of in rates) and not killing.failed_replays


def show_result(trial: MutantResult, console: Console) -> None:
    """Print the result of one mutant."""
    name = f"seed {trial.seed}: {trial.mutant}"
    if trial.task:
        nodes = "" if trial.nodes is None else f", reduced to {trial.nodes} nodes"
        by = f"{trial.task}: {trial.check}, check {trial.checks}, {format_duration(trial.seconds)}{nodes}"
        console.print(f"{name} killed by {by}: {trial.verdict}", markup=False, soft_wrap=True)
    elif trial.is_killed:
        console.print(f"{name} killed as it ended the worker: {trial.verdict}", markup=False, soft_wrap=True)
    else:
        text = f"{name} SURVIVED {trial.checks} checks in {format_duration(trial.seconds)}: {trial.change}"
        console.print(text, style="red", markup=False, soft_wrap=True)


def show_rates(killing: KillReport, console: Console) -> None:
    """Print the kill rates of each seed, the size of reduced graphs, and the number of successful replays."""
    for seed in killing.seeds:
        rates = ", ".join(
            f"{name} {_format_share(killed, of)}"
            for name, blind in MUTANT_GROUPS.items()
            if (rate := killing.count_kills(seed=seed, blind=blind))[1]
            for killed, of in [rate]
        )
        console.print(f"{killing.profile}, seed {seed}: killed {rates}", markup=False)
    for name, of_pass in (("operators", False), ("passes", True)):
        median = killing.compute_median_nodes(of_pass=of_pass)
        if median is not None:
            console.print(f"reduced failing graphs of {name}: median {median:g} nodes", markup=False)
    failed = killing.failed_replays
    if killing.replayed:
        again = _format_share(len(killing.replayed) - len(failed), len(killing.replayed))
        count = len({trial.reproducer for trial in killing.trials if trial.reproducer})
        killed, _ = killing.count_kills(seed=killing.seeds[0])
        left = f"left a reproducer: {count} of {killed} that seed {killing.seeds[0]} killed"
        console.print(f"{left}; failed again in a fresh process: {again}", markup=False)
    for result in failed:
        console.print(f"{result.task.subject}: {result.comparison.message}", style="red", markup=False, soft_wrap=True)


def _format_share(part: int, of: int) -> str:
    return f"{part} of {of} ({100 * part / of:.1f} %)"


def run_correct_targets_and_show(
    targets: Sequence[str],
    *,
    profile: str,
    seeds: int,
    subjects: Sequence[str],
    levels: Sequence[str],
    workers: int,
) -> int:
    """Run correct targets, print the failing checks, and return the exit status: 1 if any check fails.

    Raises:
        ClikaError: there is no such target, profile, level or subject, a run was interrupted, or it got no workers.
    """
    console = result_console()
    alarms = 0
    for target in targets:
        for seed in range(seeds):
            request = RunRequest(target, select_profile(profile, seed), tuple(subjects), tuple(levels), workers=workers)
            record = execute_plan(plan_run(request))
            show_alarms(record, console)
            alarms += len(record.failures)
            if record.is_abandoned:
                raise ClikaError(record.doubts[0])
    return 1 if alarms else 0


def show_alarms(record: RunRecord, console: Console) -> None:
    """Print the failures of a correct target: each is a false alarm or a real bug."""
    failures = record.failures
    text = (
        f"{record.target}, {record.profile}, seed {record.seed}: {len(failures)} failures in {record.planned:,} checks"
    )
    console.print(text, style="red" if failures else "", markup=False)
    for result in failures:
        console.print(f"  {result.verdict}: {result.task}: {result.name}", markup=False, soft_wrap=True)
