"""What another process says, line by line, until it is gone: what it has started may hold the pipe for longer."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator

LOOK_SECONDS = 0.2
"""Between two looks whether a process that is silent still lives; the end of its pipe, where it comes, needs none."""

CHUNK_BYTES = 2**16
"""What a pipe holds."""


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield whole lines of what a process writes to its standard output, until that ends or the process has."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    pipe = select.poll()
    pipe.register(descriptor, select.POLLIN)
    while True:
        is_gone = process.poll() is not None  # asked first: all that it said is in the pipe by then
        if pipe.poll(0 if is_gone else LOOK_SECONDS * 1000):
            said = os.read(descriptor, CHUNK_BYTES)
            if not said:
                return
            *lines, rest = (rest + said).split(b"\n")
            yield from (line.decode() for line in lines)
        elif is_gone:
            return
