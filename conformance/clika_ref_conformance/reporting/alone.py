"""A case replayed in a process of its own, which the target may end with any status, 0 too."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from clika_ref.command_line.endings import Status, plain_errors
from clika_ref.core.registry import load_registry
from clika_ref.reporting.console import result_console
from clika_ref_conformance.execution.blaming import heed_no_keyboard
from clika_ref_conformance.execution.endings import tells_of_memory
from clika_ref_conformance.execution.worker import limit_memory
from clika_ref_conformance.profiles import Profile
from clika_ref_conformance.reporting.reading import replay_and_show
from clika_ref_conformance.reporting.replaying import read_reproducer
from clika_ref_conformance.verdicts import Verdict

OURS = 64
"""Added to the status of a replay that came to its end: what is below is the target's doing, and so are signals."""

STATUSES = range(3)

TIMEOUT = "Timeout ("
"""Begins what a process writes that has taken too long. Source: faulthandler.dump_traceback_later."""


def replay_alone(path: Path, target: str = "", *, debug: bool = False) -> int:
    """Replay a case as `replay_and_show` does, errors as messages, and return the exit status: 1 where it was ended."""
    command = [sys.executable, "-m", __name__, str(path), target, "debug" if debug else ""]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        status = subprocess.run(command, stderr=errors, check=False).returncode  # noqa: S603 - this file
        errors.seek(0)
        words = errors.read()
    sys.stderr.write(words)
    if status - OURS in STATUSES:
        return status - OURS
    result_console().print(_ending(status, words), markup=False)
    return 1


def _ending(status: int, words: str) -> str:
    """Say how a target ended its process, from the status and from what it wrote."""
    if TIMEOUT in words:
        return f"{Verdict.HANG}: no end within the time that the run allowed"
    verdict = Verdict.MEMORY if tells_of_memory(words) else Verdict.CRASH
    return f"{verdict}: the target ended its process, with status {status}"


def main() -> None:
    """Replay the case of the command line."""
    path, target, debug = sys.argv[1:]
    heed_no_keyboard()
    try:
        with plain_errors(debug=bool(debug), refused=Status.MISUSED):
            _guard(read_reproducer(Path(path), load_registry()).profile)
            status = replay_and_show(Path(path), target)
    except typer.Exit as stated:
        status = stated.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(OURS + status)  # what a runtime does as its process ends is no finding of a run either


def _guard(profile: Profile) -> None:
    """Let this process have the time and the memory that the run allowed, and say where it ends."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(profile.case_seconds, exit=True)
    limit_memory(profile.memory_bytes)


if __name__ == "__main__":
    main()
