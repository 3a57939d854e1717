"""Signals that ask a run to end, as Ctrl-C does: it ends its workers, frees its folder and says what it had done."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from types import FrameType

from clika_ref.core.errors import ClikaError

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What a system sends that wants a process to end, and a terminal that closes: it does not reach the workers."""


class Interruption(KeyboardInterrupt):
    """Someone asked the run to end; a plain KeyboardInterrupt is raised by code under test."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and the signals of `ENDING` raise an `Interruption` in the block; those that are ignored stay so.

    Raises:
        ClikaError: code under test raised a KeyboardInterrupt, though nobody asked the run to end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interruption):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        msg = f"{place.name} raised a KeyboardInterrupt ({place.filename}, line {place.lineno}): let it raise an error"
        raise ClikaError(msg) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    """Interrupt, by signals of `ENDING` only once: what sends them sends them again while the run tidies up."""
    if number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise Interruption
