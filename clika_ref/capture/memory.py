"""Memory while a model is captured: what the garbage collector searches, the C library keeps and calls stand in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_CLAIM = 2**16
"""Slots of 8 bytes: Python rounds the chunk up to 1 MiB, which leaves 480 KiB, or a thousand calls, beneath."""


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


def in_one_chunk(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function and all that it calls stand in one chunk of Python's own stack.

    Python adds a chunk of 16 KiB, asked of the system, whenever a call does not fit into the last one, and gives it
    back when the call returns. Where the inner loop of a trace happens to stand at such a border, that took a quarter
    of its time. So one call claims much: it touches none of it, but its chunk has room for the calls beneath.
    See https://github.com/python/cpython/issues/142183, which newer versions of Python mend.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_CLAIM)  # type: ignore[attr-defined]
    return call
