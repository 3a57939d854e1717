"""Runs of correct targets over several seeds; each failure is a false alarm or a real bug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clika_ref_conformance.execution.run import RunRequest, execute_plan, plan_run
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.record import RunRecord


@dataclass(frozen=True)
class CorrectTargetRun:
    """One run of a correct target."""

    target: str
    seed: int
    record: RunRecord


def run_correct_targets(
    targets: Sequence[str],
    *,
    profile: str = "quick",
    seeds: Sequence[int] = (0,),
    subjects: Sequence[str] = (),
    levels: Sequence[str] = (),
    workers: int = 2,
) -> Iterator[CorrectTargetRun]:
    """Run each target with each seed, and yield each record before the next run starts.

    Raises:
        ClikaError: there is no such target, profile, level or subject.
    """
    for target in targets:
        for seed in seeds:
            chosen = select_profile(profile, seed)
            request = RunRequest(target, chosen, tuple(subjects), tuple(levels), workers=workers)
            yield CorrectTargetRun(target, seed, execute_plan(plan_run(request)))
