"""One worker as the run sees it: a spawned process, the task it is doing, and when it must next be heard of."""

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
from clika_ref_conformance.execution.listening import lines_of
from clika_ref_conformance.execution.messages import Setup
from clika_ref_conformance.record import Result

START_SECONDS = 120.0
"""Until a worker has started: importing torch and a runtime takes 3 s, or tens of them on a busy machine."""

PLAN_SECONDS = 600.0
"""Until a task is planned, and between its checks: drawing a thousand calls takes seconds."""

END_SECONDS = 10.0
"""Until a worker that has no more to do has ended: it may wait for what a target has started."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder is made with a name of its own and for its owner only

ROOM_BYTES = 2**30
"""What must be free there: artifacts of cases are small, and removed with their case."""

MODULES = "Extension modules: "
"""What faulthandler writes behind a crash, in one line that may have thousands of characters."""

TAIL = 30
"""Lines that are quoted of what a process wrote; a traceback of `faulthandler` takes about so many."""


def end_of(text: str) -> str:
    """Return the last lines of what a process wrote, which say how it ended."""
    lines = [line for line in text.splitlines() if not line.startswith(MODULES)]
    return "\n".join(lines[-TAIL:])


@dataclass
class Progress:
    """How far a task has come: it outlives the workers that die of it."""

    task: Task
    plan: list[str] | None = None
    results: dict[str, Result] = field(default_factory=dict[str, Result])
    started: str | None = None
    """The check that a worker is running now."""
    spared: set[str] = field(default_factory=set[str])
    """Checks that are run a second time, as someone else may have ended the worker of the first."""
    fruitless: int = 0
    """How many workers died in a row without having run a check."""
    is_ended: bool = False
    """Whether every check has its result."""


Event = tuple["WorkerProcess", str, Any]
"""Who says it, what (``ended`` where the process is gone), and the content."""


class WorkerProcess:
    """A spawned worker. A thread of its own puts what it says into the queue of the run, and sees it end.

    It leads a session, so that what a target starts ends with it. What is typed at the terminal reaches the run alone.
    """

    def __init__(self, setup: Setup, events: queue.Queue[Event]) -> None:
        self.setup = setup
        self.progress: Progress | None = None
        self.checks = 0
        self.is_ready = False
        self.expect(START_SECONDS)
        self.overdue = False
        """Whether it was killed because it was not heard of in time."""
        self.stderr = tempfile.TemporaryFile("w+b", dir=setup.folder)  # noqa: SIM115 - closed with the process
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
        self._tell(json.dumps(setup.as_json()) + "\n")

    def _listen(self, events: queue.Queue[Event]) -> None:
        try:
            for line in lines_of(self.process):
                kind, content = json.loads(line)
                events.put((self, kind, content))
        except (ValueError, TypeError):  # something else has written there: nothing that follows can be believed
            self.kill()
        self.process.wait()
        self.kill()  # what it leaves behind; its number stays taken as long as a process is in its group
        events.put((self, "ended", None))

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already, which the thread that listens reports
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def give(self, progress: Progress) -> None:
        """Let it do what is left of a task."""
        self.progress = progress
        self.expect(PLAN_SECONDS)
        done = {name: result.verdict for name, result in progress.results.items()}
        self._tell(json.dumps({"task": asdict(progress.task), "done": done}) + "\n")

    def expect(self, seconds: float) -> None:
        """Allow it so long until it is heard of again."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def kill(self) -> None:
        """End it at once, and whatever it has started."""
        if self.listener.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let it end, or kill it where it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.listener.join(END_SECONDS)
        self.kill()
        self.close()

    def close(self) -> str:
        """Free what it held, once it is gone; return the end of what it wrote to standard error."""
        self.listener.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.stderr.closed:
            return ""
        self.stderr.seek(0)
        text = self.stderr.read().decode("utf-8", "replace")
        self.stderr.close()
        return end_of(text)


def folder_for(parent: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Make the folder of a run, in memory where there is room; it is removed with all that killed workers left in it.

    Targets flush what they write: on a disk that takes longer than compiling and running a case.
    """
    if parent is None and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES:
        parent = SHARED_MEMORY
    return tempfile.TemporaryDirectory(prefix="clika-ref-conformance-", dir=parent, ignore_cleanup_errors=True)


def seconds_to_wait(workers: Sequence[WorkerProcess], at_most: float) -> float:
    """Return the seconds until the next worker is overdue; those that are have been killed already."""
    now = time.monotonic()
    return max(0.0, min([at_most, *(worker.deadline - now for worker in workers if not worker.overdue)]))
