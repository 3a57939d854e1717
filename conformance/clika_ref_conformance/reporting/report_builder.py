"""Create the report of a run from its record."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clika_ref_conformance.cases import Task
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reporting.report import SEVERITY_BY_VERDICT, Detail, Report, TaskReport, UnrunChecks
from clika_ref_conformance.verdicts import Verdict, sum_counts

MAX_LISTING_BYTES = 2**20
"""Larger facts of a reproducer are not read for the listing, to keep the report small."""


def make_report(record: RunRecord, folder: Path | None = None) -> Report:
    """Return the report of a run; listings are read from the reproducers in ``folder``."""
    found: dict[Task, list[CheckResult]] = {task: [] for task in record.plan}
    for result in record.results:
        found.setdefault(result.task, []).append(result)
    return Report(
        record.target,
        record.profile,
        record.seed,
        dict(record.environment),
        record.seconds,
        record.planned,
        [_make_task_report(task, results, folder) for task, results in found.items()],
        [dict(deviation) for deviation in record.deviations],
        [*record.problems, *record.inconclusive_reasons, *record.find_accounting_errors()],
        not_run=_count_unrun(record.results),
        part=record.part,
        target_folder=record.target_folder,
    )


def _count_unrun(results: Sequence[CheckResult]) -> dict[str, UnrunChecks]:
    """Count checks that were not run by reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for comparison in (r.comparison for r in results if r.verdict is Verdict.NOT_RUN):
        found.setdefault(comparison.reason or "no reason given", []).append(comparison.message)
    most_first = sorted(found.items(), key=lambda item: -len(item[1]))
    return {str(reason): UnrunChecks(len(messages), messages[0]) for reason, messages in most_first}


def _make_task_report(task: Task, results: Sequence[CheckResult], folder: Path | None) -> TaskReport:
    counts = Counter(result.verdict for result in results)
    verdicts = sorted(counts, key=SEVERITY_BY_VERDICT.__getitem__, reverse=True)
    chosen = [max((r for r in results if r.verdict is verdict), key=_rank) for verdict in verdicts]
    return TaskReport(
        task,
        {verdict: counts[verdict] for verdict in verdicts},
        [_make_detail(result, folder) for result in chosen],
        **sum_counts([result.comparison for result in results]),
        seconds=sum(result.seconds for result in results),
    )


def _rank(result: CheckResult) -> tuple[bool, float, float]:
    """Rank the cases of one verdict: first by whether they can be replayed, then by the size of the error."""
    ratio, quality = result.comparison.ratio, result.comparison.quality
    # Comparisons with NaN are false, so the first of several cases would win.
    return bool(result.reproducer), ratio if ratio == ratio else float("inf"), quality if quality == quality else 0.0  # noqa: PLR0124


def _make_detail(result: CheckResult, folder: Path | None) -> Detail:
    listing = _read_listing(folder / result.reproducer) if folder is not None and result.reproducer else ""
    return Detail(result.name, result.comparison, result.run, dict(result.facts), result.reproducer, listing)


def _read_listing(path: Path) -> str:
    """Return the text of the graph in a reproducer; empty on errors, as a missing zip must not make the report fail."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("meta.json")
            return str(json.loads(archive.read(entry))["listing"]) if entry.file_size < MAX_LISTING_BYTES else ""
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile):
        return ""
