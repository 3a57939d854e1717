"""Runs of targets that are right, over several seeds: whatever fails there is a false alarm, or a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clika_ref_conformance.execution.run import RunRequest, chosen_profile, execute, plan_run
from clika_ref_conformance.record import RunRecord


@dataclass(frozen=True)
class Alarms:
    """The records of all runs."""

    records: Sequence[tuple[str, int, RunRecord]]
    """Target, seed, and what came of the run."""

    @property
    def count(self) -> int:
        """How many checks failed in all runs."""
        return sum(len(record.failures) for _, _, record in self.records)


def sound_alarms(
    targets: Sequence[str],
    *,
    profile: str = "quick",
    seeds: Sequence[int] = (0,),
    subjects: Sequence[str] = (),
    levels: Sequence[str] = (),
    workers: int = 2,
) -> Alarms:
    """Run each target with each seed.

    Raises:
        ClikaError: there is no such target, profile, level or subject.
    """
    found: list[tuple[str, int, RunRecord]] = []
    for target in targets:
        for seed in seeds:
            chosen = chosen_profile(profile, seed)
            request = RunRequest(target, chosen, tuple(subjects), tuple(levels), workers=workers)
            found.append((target, seed, execute(plan_run(request))))
    return Alarms(found)
