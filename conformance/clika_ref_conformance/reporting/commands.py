"""The commands that repeat a case, as the page and ``junit.xml`` print them."""

from __future__ import annotations

import posixpath
import shlex

from clika_ref_conformance.reporting.report import Report


def commands_of(reproducer: str, report: Report, prefix: str = ".") -> str:
    """Return what to run to repeat a case.

    Args:
        reproducer: its zip, relative to the folder of the report.
        report: that it stands in.
        prefix: what leads from where the commands are run to the folder of the report.

    """
    place = posixpath.normpath(posixpath.join(prefix, reproducer))
    path, folder = shlex.quote(place), shlex.quote(place.removesuffix(".zip"))
    home = report.target_folder  # the user's code is found wherever the commands are run, and all that was found before
    found = f"PYTHONPATH={shlex.quote(home)}${{PYTHONPATH:+:$PYTHONPATH}} " if home else ""
    option = f" --target {shlex.quote(report.target)}" if ":" in report.target else ""  # a zip may not name such code
    return (
        f"{found}clika-ref conformance replay {path}{option}\n"
        "# or with torch, numpy, clika-ref and the plugins of target and operators alone:\n"
        f"python -m zipfile -e {path} {folder} && {found}python {folder}/repro.py"
    )
