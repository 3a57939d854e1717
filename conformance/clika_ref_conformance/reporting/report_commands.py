"""Use the files of a run: replay a case, compare two reports, join several in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clika_ref.core.registry import load_registry
from clika_ref.reporting.console import result_console
from clika_ref_conformance.reporting.html_matrix import write_html
from clika_ref_conformance.reporting.json_report import read_json
from clika_ref_conformance.reporting.replay import replay
from clika_ref_conformance.reporting.report_diff import compare_reports


def replay_and_show(path: Path, target: str = "") -> int:
    """Run the case of a reproducer, print its verdict, and return the exit status.

    Raises:
        ReportError: the zip cannot be used.
        TargetError: there is no such target.
    """
    outcome = replay(path, load_registry(), target)
    console = result_console()
    where = f" on the inputs {outcome.run}" if outcome.run else ""
    console.print(f"{outcome.verdict}: {outcome.name}{where}", markup=False, soft_wrap=True)
    if outcome.comparison.message:
        console.print(outcome.comparison.message, markup=False, soft_wrap=True)
    return 1 if outcome.verdict.is_failure else 0


def diff_and_show(old: Path, new: Path) -> int:
    """Print the differences between two reports, and return the exit status.

    Raises:
        ReportError: one of them cannot be used, or they are of different targets.
    """
    found = compare_reports(read_json(old), read_json(new))
    console = result_console()
    for notice in found.notices:
        console.print(notice, style="yellow", markup=False, soft_wrap=True)
    for title, changes in (
        ("regression", found.regressions),
        ("fixed", found.fixed),
        ("new", found.new),
        ("missing", found.missing),
    ):
        for change in changes:
            console.print(
                f"{title}: {change}", style="red" if title == "regression" else None, markup=False, soft_wrap=True
            )
    counts = f"{len(found.regressions)} regressions, {len(found.fixed)} fixed"
    console.print(f"{counts}, {len(found.new)} new, {len(found.missing)} missing", markup=False)
    return found.exit_code


def join_and_show(paths: Sequence[Path], out: Path) -> None:
    """Write the matrix of several reports, and print its path.

    Raises:
        ReportError: a report cannot be used.
        ModelError: the file cannot be written.
    """
    write_html([read_json(path) for path in paths], out, [path.absolute().parent for path in paths])
    result_console().print(f"Report in {out}", markup=False)
