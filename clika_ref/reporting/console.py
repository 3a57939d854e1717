"""Consoles: a shared one for log and progress on stderr, and one for results on stdout."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar

from rich.console import Console

QUIET_VARIABLE = "CLIKA_REF_QUIET"
"""Environment variable that silences log and progress on the console. Files and results are still written."""


_is_in_command = ContextVar("in_command", default=False)


@contextlib.contextmanager
def command_context() -> Iterator[None]:
    """Suppress hints for Python callers in the block, because a command prints its own."""
    token = _is_in_command.set(True)
    try:
        yield
    finally:
        _is_in_command.reset(token)


def is_in_command() -> bool:
    """Whether a command is running rather than a Python program."""
    return _is_in_command.get()


def is_quiet() -> bool:
    """Whether the environment variable requests a silent console."""
    return os.environ.get(QUIET_VARIABLE, "0") not in {"", "0"}


@functools.cache
def progress_console() -> Console:
    """Return the shared console for log and progress, on stderr, so that stdout carries only results.

    It is a single object, since two live displays would overwrite each other's lines.
    """
    return Console(stderr=True, highlight=False, soft_wrap=True)


def result_console() -> Console:
    """Return a console for results on stdout; wide if stdout is no terminal, so that pipes get complete cells."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def format_size(count: int) -> str:
    """Format a number of bytes.

    >>> [format_size(count) for count in (0, 999, 13_512, 999_960, 102_500_000, 4_560_000_000)]
    ['0 bytes', '999 bytes', '13.5 KB', '1.0 MB', '102.5 MB', '4,560.0 MB']
    """
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e6:,.1f} MB" if count >= 999_950 else f"{count / 1e3:.1f} KB"


def format_duration(seconds: float) -> str:
    """Format a duration.

    >>> [format_duration(s) for s in (0.0004, 0.034, 2.44, 7384)]
    ['< 1 ms', '34 ms', '2.4 s', '2 h 03 min']
    """
    if seconds < 0.0005:
        return "< 1 ms"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
