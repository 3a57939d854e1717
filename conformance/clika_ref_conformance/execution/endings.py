"""What the end of a worker says: the verdict on the check that it was running, and how the process ended."""

from __future__ import annotations

import signal

from clika_ref_conformance.execution.case_checks import OUT_OF_MEMORY
from clika_ref_conformance.execution.process import START_SECONDS, WorkerProcess
from clika_ref_conformance.verdicts import Verdict

OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP})
"""Signals that others send: a person, or a system without memory."""

EXIT_STATUS = "exit status"
"""How a verdict says that a worker ended by itself rather than by a signal."""


def verdict_of(worker: WorkerProcess, words: str) -> tuple[Verdict, str]:
    """Return the verdict on the check that a worker died of, and a message that quotes what it had written."""
    quoted = f"; it had written:\n{words}" if words else ""
    if worker.overdue:
        said = f"no end within {worker.seconds:g} s (--case-seconds, and what makes a failure small)"
        return Verdict.HANG, f"{said}; the worker was killed{quoted}"
    if tells_of_memory(words):
        return Verdict.MEMORY, f"the worker reached its memory limit ({manner_of(worker)}){quoted}"
    return Verdict.CRASH, f"the worker died ({manner_of(worker)}){quoted}"


def tells_of_memory(words: str) -> bool:
    """Whether what a process wrote says that it ended for want of memory."""
    return any(phrase in words for phrase in (*OUT_OF_MEMORY, "MemoryError"))


def manner_of(worker: WorkerProcess) -> str:
    """Say how a process ended."""
    code = worker.process.returncode
    if worker.overdue:
        return f"SIGKILL of this run, as it was not heard of for {START_SECONDS:g} s"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}: the system was out of memory, or someone ended it" if name == "SIGKILL" else name
    return f"{EXIT_STATUS} {code}"


def was_ended_by_others(worker: WorkerProcess) -> bool:
    """Whether a worker may have been ended from outside, so that nothing follows for the check that it was running."""
    return was_killed(worker) and -worker.process.returncode in OTHERS


def was_killed(worker: WorkerProcess) -> bool:
    """Whether a signal ended a worker, and not this run, nor the worker itself."""
    return worker.process.returncode < 0 and not worker.overdue
