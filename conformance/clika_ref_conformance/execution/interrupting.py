"""Signals that ask a run to end, as Ctrl-C does: it ends its workers, frees its folder and says what it had done."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What a system sends that wants a process to end, and a terminal that closes: it does not reach the workers."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals of `ENDING` raise a KeyboardInterrupt within the block; those that are ignored stay so."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    """Interrupt once: what sends a signal sends it again to all processes of a group, while the run tidies up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
