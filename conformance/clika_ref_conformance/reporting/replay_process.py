"""Replay a case in a separate process, which the target may end with any exit status, including 0."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer
from clika_ref_cli.exit_status import Status, report_errors

from clika_ref.core.registry import load_registry
from clika_ref.reporting.console import result_console
from clika_ref_conformance.execution.case_checks import has_memory_error
from clika_ref_conformance.execution.error_attribution import reset_sigint
from clika_ref_conformance.reporting.replay import read_reproducer
from clika_ref_conformance.reporting.report_commands import replay_and_show
from clika_ref_conformance.reproducing.repro_script import limit_memory
from clika_ref_conformance.verdicts import Verdict

STATUS_OFFSET = 64
"""Added to the exit status of a completed replay: the target or a signal causes all lower ones."""

REPLAY_STATUSES = range(3)

TIMEOUT_PREFIX = "Timeout ("
"""Start of the output of a process that timed out. Source: faulthandler.dump_traceback_later."""


def replay_in_process(path: Path, target: str = "", *, debug: bool = False) -> int:
    """Replay a case like `replay_and_show`, with errors as messages; return the exit status, 1 if it was ended."""
    command = [sys.executable, "-m", __name__, str(path), target, "debug" if debug else ""]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        status = subprocess.run(command, stderr=errors, check=False).returncode  # noqa: S603 - this file
        errors.seek(0)
        output = errors.read()
    sys.stderr.write(output)
    if status - STATUS_OFFSET in REPLAY_STATUSES:
        return status - STATUS_OFFSET
    result_console().print(_describe_exit(status, output), markup=False)
    return 1


def _describe_exit(status: int, output: str) -> str:
    """Describe how a target ended its process, from the exit status and its output."""
    if TIMEOUT_PREFIX in output:
        return f"{Verdict.HANG}: no result within the time limit of the run"
    verdict = Verdict.MEMORY if has_memory_error(output) else Verdict.CRASH
    return f"{verdict}: the target ended its process with status {status}"


def main() -> None:
    """Replay the case of the command line."""
    path, target, debug = sys.argv[1:]
    reset_sigint()
    try:
        with report_errors(debug=bool(debug), default=Status.MISUSE):
            profile = read_reproducer(Path(path), load_registry()).profile
            faulthandler.enable()  # print a traceback when this process ends, as in a run
            faulthandler.dump_traceback_later(profile.case_seconds, exit=True)
            limit_memory(profile.memory_bytes)
            status = replay_and_show(Path(path), target)
    except typer.Exit as stated:
        status = stated.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS_OFFSET + status)  # skip the runtime's cleanup at exit, as in a run


if __name__ == "__main__":
    main()
