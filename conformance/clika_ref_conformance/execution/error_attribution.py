"""Exceptions that are the fault of the code under test, and therefore fail only its check."""

from __future__ import annotations

import signal


def exceptions_to_catch() -> tuple[type[BaseException], ...]:
    """Return the exceptions to catch around code under test, including those meant to end the process.

    KeyboardInterrupt is included only in processes of a run, where no user can cause it: they turn no signal into an
    exception (`reset_sigint`).
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        return Exception, SystemExit, KeyboardInterrupt
    return Exception, SystemExit


def reset_sigint() -> None:
    """Let SIGINT end this process without an exception: no user sees it, and the parent run handles it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
