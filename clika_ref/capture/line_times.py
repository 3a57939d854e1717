"""Measure how long a trace spends at each line of the model, by the calls and guards that the tracer records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from traceback import FrameSummary

from clika_ref.capture.origins import format_line

PROGRESS_INTERVAL_S = 0.2
"""Time from which a line is shown, and between two shown lines."""

LONG_TRACE_S = 5.0
"""Time from which a trace counts as long, so that the log reports its slowest line."""

Clock = Callable[[], float]
"""A function that returns a time in seconds."""


class LineTimes:
    """The lines of the model that a trace reaches, with the seconds from each recorded call to the next one.

    Args:
        task: a description of the work, for people.
        progress: receives ``task`` and the current line, at most every `PROGRESS_INTERVAL_S`.
        clock: the time.
    """

    def __init__(self, task: str, progress: Callable[[str], None], clock: Clock = time.perf_counter) -> None:
        self._task, self._progress, self._clock = task, progress, clock
        self._seconds: Counter[tuple[str, int]] = Counter()
        self._line: tuple[str, int] | None = None
        self._since = self._shown = clock()

    def reach(self, frame: FrameSummary) -> None:
        """Note that the trace records a call or guard at a line of the model."""
        now = self._clock()
        if self._line is not None:
            self._seconds[self._line] += now - self._since  # pyright: ignore[reportArgumentType] - typed for counts
        self._line, self._since = (frame.filename, frame.lineno or 0), now
        if now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            self._progress(f"{self._task}, at {format_line(*self._line)}")

    def find_slow_line(self) -> str | None:
        """Return the line with most of the time of a long trace, and its share; None if the trace was short."""
        total = self._seconds.total()
        if total < LONG_TRACE_S:
            return None
        ((line, seconds),) = self._seconds.most_common(1)
        return f"{format_line(*line)} ({seconds / total:.0%} of the tracing)"
