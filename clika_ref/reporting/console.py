"""The terminal: one console for progress, which all stages and bars share, and one for results."""

from __future__ import annotations

import functools
import os

from rich.console import Console

QUIET_VARIABLE = "CLIKA_REF_QUIET"
"""Environment variable that silences log and progress on the console; files and results are written all the same."""


def is_quiet() -> bool:
    """Whether the environment asks for a silent console."""
    return os.environ.get(QUIET_VARIABLE, "0") not in {"", "0"}


@functools.cache
def progress_console() -> Console:
    """Return the console for log and progress, on stderr, so that stdout carries results only.

    It is one object, as the terminal is one: two that animate would overwrite each other's lines.
    """
    return Console(stderr=True, highlight=False, soft_wrap=True)


def result_console() -> Console:
    """Return a console for results, on stdout; wide where nobody sees its edge, so that a pipe gets whole cells."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> [duration(s) for s in (0.0004, 0.034, 2.44, 7384)]
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
