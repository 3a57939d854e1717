"""Commands that repeat a case, as printed by the page and ``junit.xml``."""

from __future__ import annotations

import posixpath
import shlex

from clika_ref_conformance.reporting.report import Report


def format_commands(reproducer: str, report: Report, prefix: str = ".") -> str:
    """Return the commands that repeat a case.

    Args:
        reproducer: its zip, relative to the folder of the report.
        report: report that contains the case.
        prefix: path from the commands' working directory to the folder of the report.
    """
    place = posixpath.normpath(posixpath.join(prefix, reproducer))
    path, folder = shlex.quote(place), shlex.quote(place.removesuffix(".zip"))
    home = report.target_folder  # importable from any working directory, in addition to the existing PYTHONPATH
    found = f"PYTHONPATH={shlex.quote(home)}${{PYTHONPATH:+:$PYTHONPATH}} " if home else ""
    option = f" --target {shlex.quote(report.target)}" if ":" in report.target else ""  # a zip must not select code
    return (
        f"{found}clika-ref conformance replay {path}{option}\n"
        "# or without the suite: it needs torch, numpy, clika-ref, and the plugins of the target and the operators\n"
        f"python -m zipfile -e {path} {folder} && {found}python {folder}/repro.py"
    )
