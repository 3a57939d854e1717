"""Worker process as seen by the run: the spawned process, its current task, and its deadline for the next message."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clika_ref_conformance.cases import Task
from clika_ref_conformance.execution.case_checks import has_memory_error
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.pipe_reader import close_pipes, read_lines
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.verdicts import Verdict

START_TIMEOUT_S = 120.0
"""Time limit for a worker to start: importing torch and a runtime takes 3 s, or tens of them on a busy machine."""

PLAN_TIMEOUT_S = 600.0
"""Time limit for planning a task, and between its checks: drawing a thousand calls takes seconds."""

END_TIMEOUT_S = 10.0
"""Time limit for an idle worker to exit: it may wait for processes that a target has started."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder gets a unique name and is private to its owner

MIN_FREE_BYTES = 2**30
"""Space that must be free there: artifacts of cases are small, and removed with their case."""

EXTENSION_MODULES_PREFIX = "Extension modules: "
"""Prefix of the line that faulthandler writes after a crash; it may have thousands of characters."""

EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP})
"""Signals that are sent from outside: by a user, or by a system without memory."""

EXIT_STATUS_LABEL = "exit status"
"""Words in a verdict for a worker that exited by itself instead of by a signal."""

MAX_QUOTED_LINES = 30
"""Number of lines quoted from the output of a process, about the length of a traceback of `faulthandler`."""


def get_last_lines(text: str) -> str:
    """Return the last lines of a process's output, which show how it ended."""
    lines = [line for line in text.splitlines() if not line.startswith(EXTENSION_MODULES_PREFIX)]
    return "\n".join(lines[-MAX_QUOTED_LINES:])


@dataclass
class TaskProgress:
    """Progress of a task. It outlives the workers that the task kills."""

    task: Task
    plan: list[str] | None = None
    results: dict[str, CheckResult] = field(default_factory=dict[str, CheckResult])
    started: str | None = None
    """Check that a worker is running now."""
    retried: set[str] = field(default_factory=set[str])
    """Checks that get a second run, as the worker of the first may have been ended from outside."""
    fruitless_workers: int = 0
    """Number of workers that died in a row without having run a check."""
    is_ended: bool = False
    """Whether every check has its result."""


WorkerEvent = tuple["WorkerProcess", str, Any]
"""Sender, type (``ended`` if the process is gone) and content of a message."""


class WorkerProcess:
    """Spawned worker. Its own thread puts its messages into the queue of the run, and detects its end.

    It leads a session, so that processes started by a target end with it. Terminal input reaches only the run.
    """

    def __init__(self, setup: WorkerSetup, events: queue.Queue[WorkerEvent]) -> None:
        self.setup = setup
        self.progress: TaskProgress | None = None
        self.checks = 0
        self.is_ready = False
        self.set_deadline(START_TIMEOUT_S)
        self.overdue = False
        """Whether it was killed because it exceeded its deadline."""
        self.stderr = tempfile.TemporaryFile("w+b", dir=setup.folder)  # noqa: SIM115 - closed with the process
        # Otherwise MKL rounds products of matrices by where the operands lie in memory.
        environment = {"MKL_CBWR": "AUTO", **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clika_ref_conformance.execution.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environment,
            encoding="utf-8",
            start_new_session=True,
        )
        self.listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self.listener.start()
        self._send(json.dumps(setup.as_json()) + "\n")

    def _listen(self, events: queue.Queue[WorkerEvent]) -> None:
        try:
            for line in read_lines(self.process):
                kind, content = json.loads(line)
                events.put((self, kind, content))
        except (ValueError, TypeError):  # foreign output in the channel: no later message can be trusted
            self.kill()
        self.process.wait()
        self.kill()  # its children; the group id stays reserved while the group has a process
        events.put((self, "ended", None))

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has exited, which the listener thread reports
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def assign(self, progress: TaskProgress) -> None:
        """Let the worker run the remaining checks of a task."""
        self.progress = progress
        self.set_deadline(PLAN_TIMEOUT_S)
        done = {name: result.verdict for name, result in progress.results.items()}
        self._send(json.dumps({"task": asdict(progress.task), "done": done}) + "\n")

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline for its next message."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def kill(self) -> None:
        """Kill it at once, with all processes that it has started."""
        if self.listener.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let it exit, or kill it if it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.listener.join(END_TIMEOUT_S)
        self.kill()
        self.close()

    def close(self) -> str:
        """Free its resources after it has exited; return the end of its standard error."""
        self.listener.join()
        close_pipes(self.process)
        if self.stderr.closed:
            return ""
        self.stderr.seek(0)
        text = self.stderr.read().decode("utf-8", "replace")
        self.stderr.close()
        return get_last_lines(text)

    def judge_exit(self, words: str) -> tuple[Verdict, str]:
        """Return the verdict on the check that ended it, and a message that quotes its output."""
        quoted = f"; its output:\n{words}" if words else ""
        if self.overdue:
            limit = f"{self.seconds:g} s (--case-seconds, and the time to shrink a failure)"
            return Verdict.HANG, f"no result within {limit}; the worker was killed{quoted}"
        if has_memory_error(words):
            return Verdict.MEMORY, f"the worker reached its memory limit ({self.describe_exit()}){quoted}"
        return Verdict.CRASH, f"the worker died ({self.describe_exit()}){quoted}"

    def describe_exit(self) -> str:
        """Describe how it ended."""
        code = self.process.returncode
        if self.overdue:
            return f"SIGKILL by this run, after {START_TIMEOUT_S:g} s without a message"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"{name}: the system ran out of memory, or somebody killed it" if name == "SIGKILL" else name
        return f"{EXIT_STATUS_LABEL} {code}"

    @property
    def is_ended_externally(self) -> bool:
        """Whether it may have been ended from outside, so that its running check has no verdict."""
        return self.is_killed_by_signal and -self.process.returncode in EXTERNAL_SIGNALS

    @property
    def is_killed_by_signal(self) -> bool:
        """Whether a signal ended it, and neither this run nor the worker itself."""
        return self.process.returncode < 0 and not self.overdue


def make_run_folder() -> tempfile.TemporaryDirectory[str]:
    """Create the folder of a run, in memory if there is space. It is removed with all leftovers of killed workers.

    Targets flush written files, which takes longer on a disk than compiling and running a case.
    """
    is_free = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > MIN_FREE_BYTES
    parent = SHARED_MEMORY if is_free else None
    return tempfile.TemporaryDirectory(prefix="clika-ref-conformance-", dir=parent, ignore_cleanup_errors=True)


def compute_wait_seconds(workers: Sequence[WorkerProcess], max_seconds: float) -> float:
    """Return the seconds until the next worker is overdue; workers that are overdue have been killed already."""
    now = time.monotonic()
    return max(0.0, min([max_seconds, *(worker.deadline - now for worker in workers if not worker.overdue)]))
