"""Memory while a model is captured: what the garbage collector searches, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
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


@contextlib.contextmanager
def trimmed() -> Iterator[None]:
    """Give what was freed meanwhile back to the system, where the C library has a call for it (glibc).

    It keeps the freed activations of a run, scattered over its heap: they would stand below all that comes later, half
    of the peak of a capture. Takes milliseconds.
    """
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)
