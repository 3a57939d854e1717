"""Console output of a run: a progress bar, then counts, failures, and the duration."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from clika_ref.core.errors import ClikaError
from clika_ref.reporting.console import format_duration, is_quiet, progress_console, result_console
from clika_ref.reporting.progress import SimpleProgressBar
from clika_ref_conformance.execution.run import Execution, RunPlan, RunRequest, execute_plan, plan_run
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reporting.crash_reproducers import add_crash_reproducers
from clika_ref_conformance.reporting.html_matrix import HTML_FILE as PAGE
from clika_ref_conformance.reporting.html_matrix import write_html
from clika_ref_conformance.reporting.json_report import write_json
from clika_ref_conformance.reporting.junit import write_junit
from clika_ref_conformance.reporting.report_builder import make_report
from clika_ref_conformance.reproducing.reproducers import remove_stale_cases

PROGRESS_LINE_SECONDS = 30.0
"""Interval between progress lines if the output is not a terminal."""

MAX_SHOWN_FAILURES = 20
"""Maximum number of failures printed in full; the report contains all of them."""


def make_report_folder(path: Path) -> Path:
    """Create the folder of a report.

    Raises:
        ClikaError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClikaError(f"cannot create the report folder {path}: {error}") from error
    return path.absolute()


class ProgressReporter:
    """Reports the progress of a run: in the bar after every check, or as an occasional line if there is no terminal."""

    def __init__(self, target: str, bar: SimpleProgressBar[None], console: Console) -> None:
        self.target = target
        self.bar = bar
        self.console = console
        self.checks = self.failed = 0
        self.due = time.monotonic() + PROGRESS_LINE_SECONDS

    def __call__(self, result: CheckResult | None, run: Execution) -> None:
        """Update the progress for a result, or for elapsed time if it is None."""
        self.checks += result is not None
        self.failed += result is not None and result.verdict.is_failure
        counts = f"Conformance of {self.target}, {self.checks:,} checks" + f", {self.failed:,} failed" * bool(
            self.failed
        )
        tasks = ", ".join(str(worker.progress.task) for worker in run.workers if worker.progress is not None)
        self.bar.desc = f"{counts} ({tasks})" if tasks else counts
        self.bar.update(run.ended_tasks - self.bar.count)
        if not is_quiet() and not self.console.is_terminal and time.monotonic() >= self.due:
            self.due = time.monotonic() + PROGRESS_LINE_SECONDS
            self.console.print(str(self.bar), markup=False)


def run_and_show(request: RunRequest) -> RunRecord:
    """Run a request, write its report if it asks for one, and print the results."""
    plan = plan_run(request)
    with SimpleProgressBar[None](total=len(plan.tasks), desc=f"Conformance of {request.target}", unit="tasks") as bar:
        record = execute_plan(plan, ProgressReporter(request.target, bar, progress_console()))
    record = write_reports(record, plan)
    print_record(record, result_console())
    if request.out is not None:
        result_console().print(f"Report in {request.out / PAGE}", markup=False)
    return record


def write_reports(record: RunRecord, plan: RunPlan) -> RunRecord:
    """Write the report of a run if its plan asks for one; return the record with all reproducers."""
    record = add_crash_reproducers(record, plan)
    if plan.request.out is not None:
        _write_report(record, plan.request.out)
    return record


def _write_report(record: RunRecord, out: Path) -> None:
    """Write every format of the report into a folder."""
    report = make_report(record, out)
    write_json(report, out / "report.json")
    write_junit(report, out / "junit.xml")
    write_html([report], out / PAGE)
    remove_stale_cases(out, {result.reproducer for result in record.results})


def print_record(record: RunRecord, console: Console) -> None:
    """Print the declared deviations that occurred, then failures and the accounting: the end of a log is read first."""
    for account in record.deviations:
        if account["occurred"]:
            console.print(f"deviation {account['id']}: {account['occurred']} checks: {account['reason']}", markup=False)
    failures = record.failures
    for result in failures[:MAX_SHOWN_FAILURES]:
        console.print(
            f"{result.verdict}: {result.task}: {result.name}" + _format_location(result), style="red", markup=False
        )
        console.print(_indent(_format_message_with_call(result)), markup=False, soft_wrap=True)
    if len(failures) > MAX_SHOWN_FAILURES:
        console.print(
            f"... and {len(failures) - MAX_SHOWN_FAILURES:,} more failures; --out reports all of them", markup=False
        )
    for problem in (*record.problems, *record.inconclusive_reasons, *record.find_accounting_errors()):
        console.print(problem, style="red", markup=False, soft_wrap=True)
    console.print(_format_summary(record), markup=False, soft_wrap=True)


def _format_location(result: CheckResult) -> str:
    parts = [f"inputs {result.run}" if result.run else "", result.reproducer]
    shown = ", ".join(part for part in parts if part)
    return f" ({shown})" if shown else ""


def _format_message_with_call(result: CheckResult) -> str:
    """Return the message, prefixed by the call if it does not quote it itself."""
    call, message = result.facts.get("call", ""), result.comparison.message
    return message if call in message else f"{call}: {message}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _format_summary(record: RunRecord) -> str:
    ordered = sorted(record.counts.items(), key=lambda item: (item[0].is_failure, item[1]), reverse=True)
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in ordered)
    short = "COUNTS DO NOT ADD UP" if record.find_accounting_errors() else "PROVES TOO LITTLE"
    outcome = {0: "passed", 1: "FAILED", 3: short}[record.exit_code]
    return (
        f"{record.target} {outcome}: {record.planned:,} checks of {len(record.plan):,} tasks in "
        f"{format_duration(record.seconds)} ({record.profile}, seed {record.seed}): {counts or 'none'}"
    )
