"""Which exceptions are the fault of the code that was called, so that they cost its check alone."""

from __future__ import annotations

import signal


def blamed() -> tuple[type[BaseException], ...]:
    """Return what to catch of code under test: what it raises to end the process, too.

    A KeyboardInterrupt is among it only where no person can have made it: in processes of a run, which turn no signal
    into one (`heed_no_keyboard`).
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        return Exception, SystemExit, KeyboardInterrupt
    return Exception, SystemExit


def heed_no_keyboard() -> None:
    """Let SIGINT end this process, which no person sees, without an exception: the run that it works for is told."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
