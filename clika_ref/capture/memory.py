"""Memory while a model is captured: what the garbage collector searches, the C library keeps and calls stand in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

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
    """Let what a run frees go back to the system at once, where the C library has calls for it (glibc).

    It keeps what was freed, scattered over its heap, and takes ever larger blocks from there the larger those are that
    are freed: the activations of a run had twice their size, and stood below all that comes later. Meanwhile each block
    of 128 KiB or more is a mapping of its own. Afterwards only those of 32 MiB are, which is where a process that frees
    large tensors ends up by itself; glibc has no way back to a limit that adapts.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    limits = getattr(libc, "mallopt", None) if _SET_BY_HAND.isdisjoint(os.environ) else None
    trim = getattr(libc, "malloc_trim", None)
    try:
        if limits is not None:
            limits(_MMAP_THRESHOLD, 128 * 2**10)
        yield
    finally:
        if limits is not None:
            limits(_MMAP_THRESHOLD, 32 * 2**20)
            limits(_TRIM_THRESHOLD, 64 * 2**20)
        if trim is not None:
            trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of parameters of ``mallopt``, from malloc.h."""

_SET_BY_HAND = frozenset({"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
"""Environment variables by which somebody may have set the limits, which then stay."""


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
