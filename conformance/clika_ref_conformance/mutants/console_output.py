"""Print the results of mutation testing: a line for each mutant as it finishes, then the kill rates."""

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
    """Run mutants, print the results, and return the exit status: 1 if a seed kills too few, else 0.

    Args:
        words: select mutants with one of these words in their name or change; all mutants if empty.
        target: the target that the suite runs on.
        profile: the profile of the suite.
        seeds: number of seeds.
        workers: number of worker processes.
        json_file: file for the report as JSON; None to write none.
    """
    console = result_console()
    report = run_mutants(
        select_mutants(words),
        target=target,
        profile=profile,
        seeds=range(seeds),
        workers=workers,
        notice=lambda result: show_result(result, console),
    )
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")
    show_rates(report, console)
    return 0 if has_enough_kills(report) else 1


def has_enough_kills(report: KillReport) -> bool:
    """Return whether each seed reaches the kill rate of the profile and every reproducer fails again."""
    counts = [report.count_kills(seed=seed) for seed in report.seeds]
    min_rate = MIN_KILL_RATES[report.profile]
    return all(killed >= min_rate * total for killed, total in counts) and not report.failed_replays


def show_result(result: MutantResult, console: Console) -> None:
    """Print the result of one mutant."""
    name = f"seed {result.seed}: {result.mutant}"
    if result.task:
        nodes = "" if result.nodes is None else f", reduced to {result.nodes} nodes"
        check = f"{result.task}: {result.check}, check {result.checks}, {format_duration(result.seconds)}{nodes}"
        console.print(f"{name} killed by {check}: {result.verdict}", markup=False, soft_wrap=True)
    elif result.is_killed:
        console.print(f"{name} killed as it ended the worker: {result.verdict}", markup=False, soft_wrap=True)
    else:
        text = f"{name} SURVIVED {result.checks} checks in {format_duration(result.seconds)}: {result.change}"
        console.print(text, style="red", markup=False, soft_wrap=True)


def show_rates(report: KillReport, console: Console) -> None:
    """Print the kill rates of each seed, the size of reduced graphs, and the number of successful replays."""
    for seed in report.seeds:
        counts = {name: report.count_kills(seed=seed, blind=blind) for name, blind in MUTANT_GROUPS.items()}
        rates = [f"{name} {_format_share(killed, total)}" for name, (killed, total) in counts.items() if total]
        console.print(f"{report.profile}, seed {seed}: killed {', '.join(rates)}", markup=False)
    for name, of_pass in (("operators", False), ("passes", True)):
        median = report.compute_median_nodes(of_pass=of_pass)
        if median is not None:
            console.print(f"reduced failing graphs of {name}: median {median:g} nodes", markup=False)
    failed = report.failed_replays
    if report.replayed:
        first = report.seeds[0]
        killed, _ = report.count_kills(seed=first)
        count = len({result.reproducer for result in report.results if result.reproducer})
        repeated = _format_share(len(report.replayed) - len(failed), len(report.replayed))
        text = f"left a reproducer: {count} of {killed} that seed {first} killed; failed again in a fresh process: "
        console.print(f"{text}{repeated}", markup=False)
    for replay in failed:
        console.print(f"{replay.task.subject}: {replay.comparison.message}", style="red", markup=False, soft_wrap=True)


def _format_share(part: int, total: int) -> str:
    return f"{part} of {total} ({100 * part / total:.1f} %)"


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
    alarm_count = 0
    for target in targets:
        for seed in range(seeds):
            request = RunRequest(target, select_profile(profile, seed), tuple(subjects), tuple(levels), workers=workers)
            record = execute_plan(plan_run(request))
            show_alarms(record, console)
            alarm_count += len(record.failures)
            if record.is_abandoned:
                raise ClikaError(record.inconclusive_reasons[0])
    return 1 if alarm_count else 0


def show_alarms(record: RunRecord, console: Console) -> None:
    """Print the failures of a correct target: each is a false alarm or a real bug."""
    failures = record.failures
    text = (
        f"{record.target}, {record.profile}, seed {record.seed}: {len(failures)} failures in {record.planned:,} checks"
    )
    console.print(text, style="red" if failures else "", markup=False)
    for result in failures:
        console.print(f"  {result.verdict}: {result.task}: {result.name}", markup=False, soft_wrap=True)
