"""The level that replays reproducers with their mutant seeded; a check passes if the reproducer fails again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from clika_ref_conformance.cases import Check, Outcome, Task
from clika_ref_conformance.mutants.catalogue import load_mutants
from clika_ref_conformance.reporting.replay import replay
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "replays"


def tasks(suite: Suite) -> list[Task]:
    """Return no tasks: only the run that wrote the reproducers knows them."""
    return []


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the check of one reproducer; its path is stored as the dtype of the task."""
    return [Check("replay", partial(_replay_reproducer, task, suite))]


def _replay_reproducer(task: Task, suite: Suite) -> Outcome:
    with load_mutants()[task.subject].activate(suite.registry):
        faulty = replay(Path(task.dtype), suite.registry, suite.setup["target"])
    if not faulty.verdict.is_failure:
        text = f"{task.dtype} does not fail again: {faulty.verdict} {faulty.comparison.message}"
        return Outcome("replay", Comparison(Verdict.CONTRACT, text))
    return Outcome("replay", Comparison(Verdict.PASS))
