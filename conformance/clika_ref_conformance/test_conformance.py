"""The conformance suite as tests: ``pytest --pyargs clika_ref_conformance --target NAME``."""

from __future__ import annotations

import pytest

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution

SHOWN = 5
"""Failures of a task that are shown."""


def test_the_target_computes_what_eager_computes(task: Task, conformance_run: Execution) -> None:
    """Fail with the first failures of a task; skip it where nothing of it could be run."""
    results = conformance_run.results_of(task)
    failures = [r for r in results if r.verdict.is_failure]
    if failures:
        shown = "\n".join(
            f"{r.verdict}: {r.name} {r.run} {r.reproducer}\n{r.comparison.message}" for r in failures[:SHOWN]
        )
        pytest.fail(f"{task}: {len(failures)} of {len(results)} checks failed\n{shown}", pytrace=False)
    if not conformance_run.every[task].is_ended:
        pytest.fail("\n".join(conformance_run.doubts), pytrace=False)
    silent = {str(r.verdict) for r in results if r.verdict.is_silent}
    if results and silent and all(r.verdict.is_silent for r in results):
        pytest.skip(f"{' and '.join(sorted(silent))}: {results[0].comparison.message}")
