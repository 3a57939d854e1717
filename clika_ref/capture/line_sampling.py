"""Find the line of the model where a long trace spends its time, by sampling from a second thread."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import torch

from clika_ref.capture.origins import format_line

SAMPLING_INTERVAL_S = 0.2
"""Time between two samples; each takes a few microseconds."""

LONG_TRACE_SAMPLES = 25
"""Number of samples (5 s) from which a trace counts as long, so that the log reports its slowest line."""

_PACKAGE_DIR = str(Path(__file__).parent.parent)
_SITE_PACKAGES_DIR = str(Path(torch.__file__).parent.parent)
_STDLIB_DIR = sysconfig.get_paths()["stdlib"]
_SPECS = map(find_spec, ("torch", "sympy"))  # find_spec does not import: sympy takes a third of a second
_TRACER_DIRS = tuple(str(Path(spec.origin).parent) for spec in _SPECS if spec and spec.origin)


@contextlib.contextmanager
def sample_lines(task: str, progress: Callable[[str], None]) -> Iterator[Counter[str]]:
    """Yield a counter of the model lines where this thread is sampled while the context lasts.

    Args:
        task: a description of the thread's work, for people.
        progress: receives ``task`` and the line at each sample.
    """
    lines: Counter[str] = Counter()
    thread, over = threading.get_ident(), threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLING_INTERVAL_S):
            # Do not keep the frame: it keeps its tensors alive, and torch.export then takes a fake one for a constant.
            line = innermost_model_line(sys._current_frames().get(thread))
            if line is not None:
                lines[line] += 1
                progress(f"{task}, at {line}")

    watcher = threading.Thread(target=sample, name="clika-ref: which line is traced", daemon=True)
    watcher.start()
    try:
        yield lines
    finally:
        over.set()
        watcher.join()


def find_slow_line(lines: Counter[str]) -> str | None:
    """Return the line with the most samples of a long trace, and its share of the time; None if the trace was short.

    >>> find_slow_line(Counter({"model.py:7": 24, "model.py:9": 8}))
    'model.py:7 (75% of the tracing)'
    """
    looks = lines.total()
    if looks < LONG_TRACE_SAMPLES:
        return None
    ((line, count),) = lines.most_common(1)
    return f"{line} ({count / looks:.0%} of the tracing)"


def innermost_model_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of the model among the calls below a frame.

    Model lines are outside PyTorch, sympy and the standard library. Calls around this package do not count.
    """
    while isinstance(frame, FrameType):  # the frames of a running thread change: CPython may return another object
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE_DIR):
            return None
        is_standard = file.startswith(_STDLIB_DIR) and not file.startswith(_SITE_PACKAGES_DIR)
        if not is_standard and not file.startswith((*_TRACER_DIRS, "<")):
            return format_line(file, frame.f_lineno)
        frame = frame.f_back
    return None
