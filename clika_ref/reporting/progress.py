"""``SimpleProgressBar``: a progress bar with count, rate and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clika_ref.core.errors import ModelError
from clika_ref.reporting.console import format_duration, is_quiet, progress_console

T = TypeVar("T")

PROGRESS_BAR_WIDTH = 40


class SimpleProgressBar(Generic[T]):
    """A progress bar over an iterable, or one that is updated manually.

    On a terminal it shows description, bar, count, rate in elements per second, and time. Elsewhere it prints one line
    at the end. The argument order is that of tqdm.

    ```python
    for batch in SimpleProgressBar(loader, desc="Calibrating"): ...

    with SimpleProgressBar(total=1000, desc="Downloading") as bar:
        bar.update(10)
    ```

    Args:
        iterable: the iterable; may be omitted if `update` is called manually.
        desc: the description.
        total: the number of elements; by default ``len(iterable)``, and unknown for a generator.
        unit: name of one element in the rate.
        disable: whether to show nothing.

    Raises:
        ModelError: ``iterable`` is not iterable, or ``total`` is negative.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        desc: str = "",
        total: int | None = None,
        *,
        unit: str = "it",
        disable: bool = False,
    ) -> None:
        if iterable is not None and not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            hint = f" For a bar of that many steps, pass total={iterable}." if isinstance(iterable, int) else ""
            raise ModelError(f"SimpleProgressBar({iterable!r}): a {type(iterable).__name__} is not iterable.{hint}")
        if total is not None and total < 0:
            raise ModelError(
                f"SimpleProgressBar(total={total}): it is negative. Give the number of elements, or None if it is "
                "unknown."
            )
        self.desc = desc
        self.total = total if total is not None else _length_or_none(iterable)
        self.count = 0
        self._iterable = iterable
        self._unit = unit
        self._console: Console | None = None if disable or is_quiet() else progress_console()
        self._live: Live | None = None
        self._started: float | None = None
        self._ended: float | None = None

    def __len__(self) -> int:
        if self.total is None:  # len() of a generator raises TypeError too, and list() of this bar expects it
            raise TypeError(
                f"the iterable of SimpleProgressBar({self.desc!r}) has no length. Pass total= if you know it."
            )
        return self.total

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise ModelError("cannot iterate over SimpleProgressBar: it has no iterable. Pass one, or call update().")
        with self:
            for element in self._iterable:
                yield element
                self.count += 1

    def update(self, n: int = 1) -> None:
        """Advance by ``n`` elements."""
        if self._started is None:
            self.start()
        self.count += n

    def start(self) -> None:
        """Show the bar and start its clock. A closed bar starts again from 0."""
        if self._started is not None and self._ended is None:
            return
        self.count, self._started, self._ended = 0, time.perf_counter(), None
        if self._console is not None and self._console.is_terminal:
            self._live = Live(
                get_renderable=self._line, console=self._console, redirect_stdout=False, refresh_per_second=8
            )
            self._live.start(refresh=True)

    def close(self) -> None:
        """Stop the clock and print the final line."""
        if self._started is None or self._ended is not None:
            return
        self._ended = time.perf_counter()
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._console is not None:
            self._console.print(str(self), markup=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end, or to now."""
        if self._started is None:
            return 0.0
        return (time.perf_counter() if self._ended is None else self._ended) - self._started

    def __str__(self) -> str:
        """Description, count, time and rate: ``Calibrating  20/20  6.0 s  3.31 it/s``."""
        return "  ".join(part for part in (self.desc, self._format_facts()) if part)

    def _format_facts(self) -> str:
        count = f"{self.count:,}" if self.total is None else f"{self.count:,}/{self.total:,}"
        seconds = self.seconds
        rate = f"{self.count / seconds:,.2f}" if self.count and seconds else "-"
        return f"{count}  {format_duration(seconds)}  {rate} {self._unit}/s"

    def _line(self) -> RenderableType:
        total = self.count if self.total is None and self._ended is not None else self.total
        bar = ProgressBar(total=total, completed=self.count, width=PROGRESS_BAR_WIDTH)  # pulses without a total
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(*([Text(self.desc)] if self.desc else []), bar, Text(self._format_facts()))
        return row


def _length_or_none(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:  # generators, None, and DataLoaders over iterable datasets, whose __len__ raises
        return None
