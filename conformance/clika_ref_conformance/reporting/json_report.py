"""``report.json``: machine-readable report with a schema version, written and read back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clika_ref.serialization.atomic_files import write_atomically
from clika_ref_conformance.cases import Task
from clika_ref_conformance.reporting.report import Detail, Report, TaskReport, UnrunChecks
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.reproducing.json_values import read_number, to_json
from clika_ref_conformance.verdicts import COUNT_FIELDS, Comparison, Verdict

SCHEMA_VERSION = 2
"""Increased when the fields change. Only reports of this version are read."""

JSON_FILE = "report.json"

MAX_REPORT_BYTES = 512 * 2**20
"""Size limit of a report to read. The suite's reports have a few megabytes, as they do not list every case."""

_REPRODUCER_PATTERN = re.compile(r"cases/[A-Za-z0-9_][A-Za-z0-9._-]*")


def write_json(report: Report, path: Path) -> None:
    """Write a report.

    Raises:
        ModelError: the path cannot be written.
    """
    with write_atomically(path) as file:
        file.write(json.dumps(to_json(report_to_json(report)), indent=1, allow_nan=False).encode())


def report_to_json(report: Report) -> dict[str, Any]:
    """Return the document of a report; it may still contain infinite numbers."""
    return {
        "schema": SCHEMA_VERSION,
        "target": report.target,
        "target_folder": report.target_folder,
        "profile": report.profile,
        "seed": report.seed,
        "part": report.part,
        "seconds": report.seconds,
        "environment": report.environment,
        "planned": report.planned,
        "verdicts": {str(verdict): count for verdict, count in report.counts.items()},
        "failures": report.failures,
        "problems": report.problems,
        "not_run": {reason: asdict(unrun) for reason, unrun in report.not_run.items()},
        "deviations": report.deviations,
        "tasks": [_task_to_json(entry) for entry in report.tasks],
    }


def _task_to_json(entry: TaskReport) -> dict[str, Any]:
    return {
        **asdict(entry.task),
        "verdict": str(entry.verdict),
        "grade": entry.grade,
        "verdicts": {str(verdict): count for verdict, count in entry.verdicts.items()},
        **{key: getattr(entry, key) for key in COUNT_FIELDS},
        "seconds": entry.seconds,
        "details": [_detail_to_json(detail) for detail in entry.details],
    }


def _detail_to_json(detail: Detail) -> dict[str, Any]:
    comparison = asdict(detail.comparison) | {"verdict": str(detail.verdict), "grade": detail.comparison.grade}
    rest = {"check": detail.check, "run": detail.run, "facts": detail.facts}
    return rest | comparison | {"reproducer": detail.reproducer, "listing": detail.listing}


def read_json(path: Path) -> Report:
    """Read a report and check that its counts add up.

    Raises:
        ReportError: it is no report, is damaged, or has another schema.
    """
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            size = f"{path.stat().st_size:,} bytes, more than {MAX_REPORT_BYTES:,}"
            raise ReportError(f"cannot read the report {str(path)!r}: it has {size}")  # noqa: TRY301 - the handlers below are for errors of reading
        return _read(json.loads(path.read_bytes()))
    except OSError as error:
        raise ReportError(
            f"cannot read the report {str(path)!r}: {error.strerror}. Give the report.json of a run."
        ) from error
    except ReportError as error:
        error.add_note(f"in {path}")
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"it is damaged, or no report of a run ({type(error).__name__}: {error})"
        raise ReportError(f"cannot read the report {str(path)!r}: {problem}") from error


def _read(document: Mapping[str, Any]) -> Report:
    schema = _read_count(document["schema"], "schema")
    if schema != SCHEMA_VERSION:
        problem = f"it has schema {schema}, but this suite reads schema {SCHEMA_VERSION}"
        remedy = "Update the suite." if schema > SCHEMA_VERSION else "A development version wrote it; run again."
        raise ReportError(f"cannot read the report: {problem}. {remedy}")
    report = Report(
        str(document["target"]),
        str(document["profile"]),
        int(document["seed"]),
        _to_texts(document["environment"]),
        read_number(document["seconds"], "seconds"),
        _read_count(document["planned"], "planned"),
        [_read_task(entry) for entry in document["tasks"]],
        [dict(entry) for entry in document["deviations"]],
        [str(problem) for problem in document["problems"]],
        not_run={
            str(reason): UnrunChecks(_read_count(entry["count"], "not_run"), str(entry["example"]))
            for reason, entry in document["not_run"].items()
        },
        part=str(document["part"]),
        target_folder=str(document["target_folder"]),
    )
    stated, summed = document["verdicts"], {str(v): c for v, c in report.counts.items()}
    if stated != summed:
        raise ReportError(
            f"cannot read the report: its verdicts are {stated}, but those of its tasks {summed}. Run the suite again."
        )
    if report.planned != sum(summed.values()) and not report.problems:
        raise ReportError(
            f"cannot read the report: {report.planned:,} checks were planned, but {sum(summed.values()):,} have "
            "results. Run the suite again."
        )
    return report


def _read_task(entry: Mapping[str, Any]) -> TaskReport:
    task = Task.of_json(entry)
    verdicts = {
        Verdict(verdict): _read_count(count, f"{task} {verdict}") for verdict, count in entry["verdicts"].items()
    }
    details = [_read_detail(detail) for detail in entry["details"]]
    counts = {key: _read_count(entry[key], f"{task} {key}") for key in COUNT_FIELDS}
    return TaskReport(task, verdicts, details, seconds=read_number(entry["seconds"], f"seconds of {task}"), **counts)


def _read_detail(entry: Mapping[str, Any]) -> Detail:
    error, bound, ratio, quality = (read_number(entry[key], key) for key in ("error", "bound", "ratio", "quality"))
    counts = [_read_count(entry[key], key) for key in COUNT_FIELDS]
    verdict, message, reason = Verdict(entry["verdict"]), str(entry["message"]), str(entry["reason"])
    comparison = Comparison(verdict, message, error, bound, ratio, quality, *counts, reason=reason)
    check, run, reproducer, listing = (str(entry[key]) for key in ("check", "run", "reproducer", "listing"))
    if reproducer and not _REPRODUCER_PATTERN.fullmatch(reproducer):
        raise ReportError(f"the reproducer {reproducer!r} is outside the folder cases/")
    return Detail(check, comparison, run, _to_texts(entry["facts"]), reproducer, listing)


def _to_texts(entries: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in entries.items()}


def _read_count(item: Any, name: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise ReportError(f"{name} is {item!r}, not a count")
    return item
