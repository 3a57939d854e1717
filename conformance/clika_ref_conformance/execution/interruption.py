"""Signals that request a run to end, as Ctrl-C does. It ends its workers, removes its folder and reports results."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from types import FrameType

from clika_ref.core.errors import ClikaError

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a system that ends the process, and of a terminal that closes. They do not reach the workers."""


class RunInterruption(KeyboardInterrupt):
    """A user or the system requested the run to end. Code under test raises a plain KeyboardInterrupt instead."""


@contextlib.contextmanager
def handle_end_signals() -> Iterator[None]:
    """Let Ctrl-C and `END_SIGNALS` raise a `RunInterruption` in the block; ignored signals stay ignored.

    Raises:
        ClikaError: code under test raised a KeyboardInterrupt, and nobody requested the run to end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *END_SIGNALS)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, RunInterruption):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        position = f"{frame.filename}, line {frame.lineno}"
        raise ClikaError(
            f"{frame.name} raised a KeyboardInterrupt ({position}). Raise another error instead."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    """Raise a `RunInterruption`; only once for `END_SIGNALS`, as senders repeat them while the run cleans up."""
    if number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise RunInterruption
