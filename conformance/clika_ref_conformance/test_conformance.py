"""Conformance suite as tests: ``pytest --pyargs clika_ref_conformance --target NAME``."""

from __future__ import annotations

import pytest

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.run import Execution
from clika_ref_conformance.verdicts import PROVING_VERDICTS, Verdict

MAX_SHOWN_FAILURES = 5
"""Maximum number of failures shown per task."""


def test_target_matches_eager(task: Task, conformance_run: Execution) -> None:
    """Fail with the first failures of a task; skip it if none of its checks proves anything."""
    results = conformance_run.results_of(task)
    failures = [r for r in results if r.verdict.is_failure]
    if failures:
        shown = "\n".join(
            f"{r.verdict}: {r.name} {r.run} {r.reproducer}\n{r.comparison.message}"
            for r in failures[:MAX_SHOWN_FAILURES]
        )
        pytest.fail(f"{task}: {len(failures)} of {len(results)} checks failed\n{shown}", pytrace=False)
    if not conformance_run.progress_by_task[task].is_ended:
        pytest.fail("\n".join(conformance_run.inconclusive_reasons), pytrace=False)
    if PROVING_VERDICTS.isdisjoint(r.verdict for r in results):
        verdicts = " and ".join(sorted({str(r.verdict) for r in results}))
        pytest.skip(f"{verdicts}: {results[0].comparison.message}" if results else "no checks are planned")


def test_run_proves_enough(conformance_run: Execution) -> None:
    """Fail with the problems of the run as a whole, as the command line does with its exit status."""
    conformance_run.run()
    record = conformance_run.record(0.0)
    passed = [f"{r.task}: {r.name}: {r.comparison.message}" for r in record.results if r.verdict is Verdict.XPASS]
    found = [
        *record.problems,
        *record.inconclusive_reasons,
        *record.find_accounting_errors(),
        *passed[:MAX_SHOWN_FAILURES],
    ]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
