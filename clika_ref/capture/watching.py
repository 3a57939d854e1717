"""Which line of the model a long trace is at: looked up from a thread beside it."""

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

from clika_ref.capture.origins import short_line

INTERVAL_S = 0.2
"""Time between two looks; each takes some microseconds."""

LONG = 25
"""Looks (5 s) from which on a trace counts as long, so that its log says where the time went."""

_OWN = str(Path(__file__).parent.parent)
_PACKAGES = str(Path(torch.__file__).parent.parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_SPECS = map(find_spec, ("torch", "sympy"))  # found, not loaded: sympy takes a third of a second
_TRACER = tuple(str(Path(spec.origin).parent) for spec in _SPECS if spec and spec.origin)


@contextlib.contextmanager
def watched(what: str, progress: Callable[[str], None]) -> Iterator[Counter[str]]:
    """Yield counts of the lines of the model at which this thread is seen while the context lasts.

    Args:
        what: what the thread is doing, for people.
        progress: receives ``what`` and the line at each look.

    """
    lines: Counter[str] = Counter()
    thread, over = threading.get_ident(), threading.Event()

    def look() -> None:
        while not over.wait(INTERVAL_S):
            # Not kept: a frame keeps its tensors alive, and torch.export then takes a fake one for a constant.
            line = line_of(sys._current_frames().get(thread))
            if line is not None:
                lines[line] += 1
                progress(f"{what}, at {line}")

    watcher = threading.Thread(target=look, name="clika-ref: which line is traced", daemon=True)
    watcher.start()
    try:
        yield lines
    finally:
        over.set()
        watcher.join()


def costly_line(lines: Counter[str]) -> str | None:
    """Return the line that cost most of a long trace and its share of the time; None where it was short.

    >>> costly_line(Counter({"model.py:7": 24, "model.py:9": 8}))
    'model.py:7 (75% of the tracing)'
    """
    looks = lines.total()
    if looks < LONG:
        return None
    ((line, count),) = lines.most_common(1)
    return f"{line} ({count / looks:.0%} of the tracing)"


def line_of(frame: FrameType | None) -> str | None:
    """Return the innermost line of the model in the calls below a frame.

    That is one outside PyTorch, sympy and the standard library; calls around this package are not the model's.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            return None
        is_standard = file.startswith(_STANDARD) and not file.startswith(_PACKAGES)
        if not is_standard and not file.startswith((*_TRACER, "<")):
            return short_line(file, frame.f_lineno)
        frame = frame.f_back
    return None
