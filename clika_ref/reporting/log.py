"""The log of one compilation: brief on the console, complete in a file."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.passes import PassReport
from clika_ref.reporting.console import format_duration, is_quiet, progress_console
from clika_ref.reporting.tables import Table

BUFFER_BYTES = 1 << 16
"""Buffer of the file: one system call per about 1,000 lines. Each stage flushes it at its end."""


STAGE_BAR_WIDTH = 30
"""Characters of a full bar."""


class CompilationLog:
    """The log of a compilation; a context manager that closes the file.

    All text also goes to the standard ``logging``, under the logger of the calling module, such as
    ``clika_ref.pipeline``: console output at ``INFO``, warnings at ``WARNING``, and the rest at ``DEBUG``.

    ``timings`` holds the seconds of each stage, in the order of their starts; repeated stages are summed. ``warnings``
    holds the text of each warning. Use `open` to create a log; without arguments, only these are recorded.

    Args:
        path: path of the file, for messages.
        file: receives everything.
        console: receives stages and warnings.
    """

    def __init__(self, path: Path | None = None, file: TextIO | None = None, console: Console | None = None) -> None:
        self.path = path
        self.timings: dict[str, float] = {}
        self.warnings: list[str] = []
        self._file = file
        self._console = console
        self._stages: list[LogStage] = []
        self._live: Live | None = None
        self._second = -1
        self._stamp = ""

    @classmethod
    def open(cls, logs_dir: Path | str | None, *, console: bool = True) -> CompilationLog:
        """Start a log, with a file ``clika_<date>_<time>.log`` in ``logs_dir`` unless that is None.

        Without ``console``, nothing is shown.

        Raises:
            ModelError: the file cannot be created.
        """
        shown = progress_console() if console and not is_quiet() else None
        if logs_dir is None:
            return cls(console=shown)
        path, file = _create_file(Path(logs_dir))
        log = cls(path, file, shown)
        log._print(f"Created log at: {path}")
        return log

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._write_error(error)
        self.close()

    def close(self) -> None:
        """Close the file. The log remains usable for the console."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the failed write was reported when the buffer was flushed
                file.close()

    def detail(self, text: str) -> None:
        """Write text to the file, with a timestamp on each line."""
        _forward_to_logging(logging.DEBUG, text)
        self._write(text)

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        now = int(time.time())
        if now != self._second:  # formatting the time costs more than writing the line
            self._second = now
            self._stamp = time.strftime("[%Y-%m-%d %H:%M:%S] ", time.localtime(now))
        if "\n" in text:
            text = text.replace("\n", f"\n{self._stamp}")
        try:
            self._file.write(f"{self._stamp}{text}\n")
        except OSError as error:
            self._abandon_file(error)

    def show(self, text: str) -> None:
        """Write text to the console and the file."""
        _forward_to_logging(logging.INFO, text)
        self._write(text)
        self._print(text)

    def warning(self, text: str) -> None:
        """Write a warning to the console, in yellow, and to the file."""
        self.warnings.append(text)
        _forward_to_logging(logging.WARNING, text)
        self._write(f"Warning: {text}")
        self._print(f"Warning: {text}", style="yellow")

    def write_header(self, settings: Mapping[str, Mapping[str, object]]) -> None:
        """Write the versions and all settings to the file: a block for each title, a line for each setting."""
        self.detail(f"clika-ref Version: {importlib.metadata.version('clika-ref')}")
        self.detail(f"'torch' Version: {torch.__version__}")
        self.detail(f"Python Version: {' '.join(sys.version.split())}")  # some builds contain a line break
        for title, block in settings.items():
            lines = [f"+ {name} = {value}" for name, value in block.items()]
            self.detail("\n".join(["", f"{title}:", *lines]))
        self.detail("")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[LogStage]:
        """Time a stage, show it on a terminal while it runs, and print one line at its end."""
        stage = LogStage(name)
        self._begin(stage)
        try:
            yield stage
        except BaseException as error:
            self._end(stage, error)
            raise
        self._end(stage, None)

    def table(self, title: str, table: Table[Any]) -> None:
        """Write a table with a title to the file."""
        self.detail(f"{title}:\n{table}")

    def report_removals(self, reports: Iterable[PassReport]) -> None:
        """Log the nodes that passes removed: a line per run to the file, the sums in one line to the console."""
        sums: Counter[str] = Counter()
        for report in reports:
            if report.removed > 0:
                self.detail(f"Removed {format_count(report.removed, report.removes)} ({report.name})")
                sums[report.removes] += report.removed
        if sums:
            text = format_stage_line("Removed", ", ".join(format_count(count, label) for label, count in sums.items()))
            _forward_to_logging(logging.INFO, text)
            self._print(text)

    def _print(self, text: str, style: str | None = None) -> None:
        if self._console is not None:
            self._console.print(text, style=style, markup=False, highlight=False)  # float32[b, 3] is not markup

    def _flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._abandon_file(error)

    def _abandon_file(self, error: OSError) -> None:
        self.close()  # first: warning() would write to it again
        self.warning(f"the log {self.path} ends here: {error.strerror}. The compilation continues without it.")

    def _write_error(self, error: Exception) -> None:
        # The error passes every open stage on its way up, and is written once. The mark is on the error: a reference to
        # the error here would keep its frames alive, and with them the model.
        if "clika_logged" not in error.__dict__:
            error.__dict__["clika_logged"] = True
            self.detail("".join(traceback.format_exception(error)).rstrip())

    def _begin(self, stage: LogStage) -> None:
        self._stages.append(stage)
        self.timings.setdefault(stage.name, 0.0)
        self.detail(f"Starting {stage.name}")
        if self._live is None and self._console is not None and self._console.is_terminal:
            spinner = Spinner("dots", style="cyan")
            # rich prints output of the user's forward above the live line. Only redirect stdout if it is a terminal:
            # rich would otherwise send it to stderr, even if stdout is a file.
            self._live = Live(
                get_renderable=lambda: self._render_live_line(spinner),
                console=self._console,
                transient=True,
                refresh_per_second=8,
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            )
            self._live.start(refresh=True)

    def _end(self, stage: LogStage, error: BaseException | None) -> None:
        seconds = time.perf_counter() - stage.started
        self._stages.remove(stage)
        self.timings[stage.name] += seconds
        if not self._stages and self._live is not None:
            self._live.stop()
            self._live = None
        if error is None:
            if stage.text:
                self._write(stage.text)
            self._write(f"Done {stage.name} in {seconds:.2f} s")
            line = format_stage_line(stage.name, stage.text, seconds)
            _forward_to_logging(logging.INFO, line)
            self._print(line)
        else:
            verb = "Failed" if isinstance(error, Exception) else "Interrupted"
            self.detail(f"{verb} {stage.name} after {seconds:.2f} s")
            self._print(format_stage_line(stage.name, verb.lower(), seconds), style="red")
            if isinstance(error, Exception):
                self._write_error(error)
        self._flush()

    def _render_live_line(self, spinner: Spinner) -> RenderableType:
        if not self._stages:  # one more refresh happens while the last stage ends
            return ""
        stage = self._stages[-1]
        text = format_stage_line(stage.name, stage.text, time.perf_counter() - stage.started)
        spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return spinner


logging.getLogger("clika_ref").addHandler(logging.NullHandler())  # otherwise Python prints warnings a second time


def _forward_to_logging(level: int, text: str) -> None:
    """Send text to the logger of the calling module: the innermost one outside this file."""
    frame, depth = sys._getframe(1), 2  # noqa: SLF001 - documented, if only for CPython
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        frame, depth = frame.f_back, depth + 1
    logger = logging.getLogger(frame.f_globals.get("__name__"))
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, stacklevel=depth)


class LogStage:
    """A stage of a compilation; created by `CompilationLog.stage`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""
        self.started = time.perf_counter()

    def update(self, text: str) -> None:
        """Set the text next to the spinner, shown on its next refresh. Cheap enough to call for every node."""
        self.text = text

    def progress(self, count: int, total: int | None, rate: float) -> None:
        """Show the number of finished elements, the total, and the rate per second."""
        share = (
            "" if total is None else f"{'━' * round(STAGE_BAR_WIDTH * count / max(total, count)):<{STAGE_BAR_WIDTH}}  "
        )
        self.update(f"{share}{count:,}{'' if total is None else f'/{total:,}'}  {rate:,.2f}/s")

    def done(self, text: str) -> None:
        """Set the text of the final line, next to name and time."""
        self.text = text


def format_stage_line(name: str, text: str, seconds: float | None = None) -> str:
    """Return the line of a stage. The time precedes the text, which may have any length.

    >>> format_stage_line("Capturing", "1,018 nodes", 2.41)
    'Capturing      2.4 s  1,018 nodes'
    """
    return f"{name:<12}{'' if seconds is None else format_duration(seconds):>8}  {text}".rstrip()


def _create_file(folder: Path) -> tuple[Path, TextIO]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            now = dt.datetime.now().astimezone()
            path = folder / f"clika_{now:%Y-%m-%d_%H-%M-%S.%f}.log"  # no colons, which Windows rejects
            with contextlib.suppress(FileExistsError):  # another process, in the same microsecond
                # backslashreplace: a path with a lone surrogate must not end a compilation.
                return path, path.open("x", BUFFER_BYTES, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ModelError(
            f"cannot write a log into logs_dir {str(folder)!r}: {error.strerror}. Give a folder that can be "
            "written, or logs_dir=None for no log."
        ) from error
