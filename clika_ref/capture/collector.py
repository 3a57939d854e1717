"""Python's garbage collector, kept away from what exists already while millions of new objects come."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """Let the garbage collector look only at objects that are made while the context lasts.

    A trace makes so many that the collector would search all of PyTorch and the model time and again: up to half of
    the time of a capture. Where somebody froze objects before, nothing happens: thawing ours would thaw theirs.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
