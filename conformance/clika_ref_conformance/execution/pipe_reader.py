"""Read the output of another process line by line until it exits, as its children may keep the pipe open."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterator

POLL_SECONDS = 0.2
"""Interval between liveness checks of a silent process. The end of its pipe, if it comes, is noticed at once."""

PIPE_BYTES = 2**16
"""Capacity of a pipe."""


def close_pipes(process: subprocess.Popen[str]) -> None:
    """Close the standard input and output of a process that has ended; a pipe may hold unread data."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def read_lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield whole lines of a process's standard output, until the pipe closes or the process exits."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    pipe = select.poll()
    pipe.register(descriptor, select.POLLIN)
    while True:
        is_gone = process.poll() is not None  # checked first: all of its output is in the pipe by then
        if pipe.poll(0 if is_gone else POLL_SECONDS * 1000):
            said = os.read(descriptor, PIPE_BYTES)
            if not said:
                return
            *lines, rest = (rest + said).split(b"\n")
            yield from (line.decode() for line in lines)
        elif is_gone:
            return
