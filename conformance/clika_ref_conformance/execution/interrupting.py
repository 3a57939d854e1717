"""Signals that request a run to end, as Ctrl-C does. It ends its workers, removes its folder and reports results."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from types import FrameType

from clika_ref.core.errors import ClikaError

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a system that ends the process, and of a terminal that closes. They do not reach the workers."""


class Interruption(KeyboardInterrupt):
    """A user or the system requested the run to end. Code under test raises a plain KeyboardInterrupt instead."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and the signals in `ENDING` raise an `Interruption` in the block; ignored signals stay ignored.

    Raises:
        ClikaError: code under test raised a KeyboardInterrupt, and nobody requested the run to end.
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
    """Raise an `Interruption`; only once for signals in `ENDING`, as senders repeat them while the run cleans up."""
    if number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise Interruption
