"""A case replayed in a process of its own, which the target may end with any status, 0 too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from clika_ref.command_line.cli import plain_errors
from clika_ref.reporting.console import result_console
from clika_ref_conformance.execution.blaming import heed_no_keyboard
from clika_ref_conformance.reporting.reading import replay_and_show
from clika_ref_conformance.verdicts import Verdict

OURS = 64
"""Added to the status of a replay that came to its end: what is below is the target's doing, and so are signals."""

STATUSES = range(3)


def replay_alone(path: Path, target: str = "", *, debug: bool = False) -> int:
    """Replay a case as `replay_and_show` does, errors as messages, and return the exit status: 1 where it was ended."""
    command = [sys.executable, "-m", __name__, str(path), target, "debug" if debug else ""]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - this file
    if status - OURS in STATUSES:
        return status - OURS
    result_console().print(f"{Verdict.CRASH}: the target ended its process, with status {status}", markup=False)
    return 1


def main() -> None:
    """Replay the case of the command line."""
    path, target, debug = sys.argv[1:]
    heed_no_keyboard()
    try:
        with plain_errors(debug=bool(debug)):
            status = replay_and_show(Path(path), target)
    except typer.Exit as stated:
        status = stated.exit_code
    sys.exit(OURS + status)


if __name__ == "__main__":
    main()
