"""Interpret the end of a worker: the verdict on the check that it was running, and how the process ended."""

from __future__ import annotations

import signal

from clika_ref_conformance.execution.case_checks import OUT_OF_MEMORY_PHRASES
from clika_ref_conformance.execution.worker_process import START_TIMEOUT_S, WorkerProcess
from clika_ref_conformance.verdicts import Verdict

EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP})
"""Signals that are sent from outside: by a user, or by a system without memory."""

EXIT_STATUS_LABEL = "exit status"
"""Text of a verdict on a worker that exited by itself instead of by a signal."""


def judge_exit(worker: WorkerProcess, output: str) -> tuple[Verdict, str]:
    """Return the verdict on the check that ended a worker, and a message that quotes the worker's output."""
    quoted = f"; its output:\n{output}" if output else ""
    if worker.overdue:
        limit = f"{worker.seconds:g} s (--case-seconds, and the time to shrink a failure)"
        return Verdict.HANG, f"no result within {limit}; the worker was killed{quoted}"
    if has_memory_error(output):
        return Verdict.MEMORY, f"the worker reached its memory limit ({describe_exit(worker)}){quoted}"
    return Verdict.CRASH, f"the worker died ({describe_exit(worker)}){quoted}"


def has_memory_error(output: str) -> bool:
    """Return whether the output of a process reports that it ran out of memory."""
    return any(phrase in output for phrase in (*OUT_OF_MEMORY_PHRASES, "MemoryError"))


def describe_exit(worker: WorkerProcess) -> str:
    """Describe how a process ended."""
    code = worker.process.returncode
    if worker.overdue:
        return f"SIGKILL by this run, after {START_TIMEOUT_S:g} s without a message"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}: the system ran out of memory, or somebody killed it" if name == "SIGKILL" else name
    return f"{EXIT_STATUS_LABEL} {code}"


def is_ended_externally(worker: WorkerProcess) -> bool:
    """Return whether a worker may have been ended from outside, so that its running check has no verdict."""
    return is_killed_by_signal(worker) and -worker.process.returncode in EXTERNAL_SIGNALS


def is_killed_by_signal(worker: WorkerProcess) -> bool:
    """Return whether a signal ended a worker, and neither this run nor the worker itself."""
    return worker.process.returncode < 0 and not worker.overdue
