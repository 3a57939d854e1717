"""Limit the memory and time of a capture: the garbage collector, the C heap and Python's stack."""

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

_STACK_SLOTS = 2**16
"""Slots of 8 bytes. Python rounds the chunk up to 1 MiB, which leaves 480 KiB, or a thousand calls."""


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Limit the garbage collector to objects created while the context lasts.

    A trace creates so many objects that the collector would search all of PyTorch and the model repeatedly, which takes
    up to half of the capture time. If the caller froze objects before, this does nothing: unfreezing would unfreeze
    theirs.
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
def release_freed_memory() -> Iterator[None]:
    """Return freed memory to the system at once, on C libraries with calls for it (glibc).

    By default, glibc keeps freed blocks scattered over its heap, and raises the size up to which it allocates there
    when larger blocks are freed. The activations of a run then take twice their size, below all later allocations. In
    this context, each block of 128 KiB or more is a separate mapping. Afterwards only blocks of 32 MiB are, the limit
    that a process that frees large tensors reaches by itself; glibc cannot restore an adaptive limit.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    limits = getattr(libc, "mallopt", None) if _MALLOC_VARIABLES.isdisjoint(os.environ) else None
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
"""Parameter numbers of ``mallopt``, from malloc.h."""

_MALLOC_VARIABLES = frozenset({"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
"""Environment variables that configure these limits; if one is set, the limits are not changed."""


def run_in_one_stack_chunk(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function and all its calls in one chunk of Python's own stack.

    Python allocates a chunk of 16 KiB from the system when a call does not fit into the last one, and frees it when the
    call returns. If the inner loop of a trace runs at such a boundary, this takes a quarter of its time. The wrapper
    claims a large frame without touching it, so that its chunk has room for the calls inside. See
    https://github.com/python/cpython/issues/142183, fixed in newer versions of Python.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_STACK_SLOTS)  # type: ignore[attr-defined]
    return call
