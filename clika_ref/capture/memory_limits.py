"""Limit the memory and time of a capture: configure the garbage collector, the C heap and Python's stack."""

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

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of ``mallopt``, from malloc.h."""

_CAPTURE_MMAP_BYTES = 128 * 2**10
"""Minimum size of an allocation with a memory mapping of its own; the initial value of glibc."""

_MAX_ADAPTIVE_MMAP_BYTES = 32 * 2**20
"""The value that glibc reaches by itself in a process that frees large tensors (``DEFAULT_MMAP_THRESHOLD_MAX``)."""

_MALLOC_VARIABLES = frozenset({"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
"""Environment variables that configure these thresholds; if one is set, the thresholds are not changed."""

_STACK_SLOTS = 2**16
"""Slots of 8 bytes. Python rounds the chunk up to 1 MiB, so that 480 KiB remain for about a thousand nested calls."""


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Limit the garbage collector to objects created in the context.

    A trace creates so many objects that the collector would search all of PyTorch and the model repeatedly, which takes
    up to half of the capture time. Imports and exports cause one such search each, of 0.1 s. If the caller has frozen
    objects, this does nothing, since ``gc.unfreeze`` would unfreeze these, too.
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

    glibc keeps small freed blocks in its heap for later allocations. It counts larger blocks as small once the process
    has freed one of that size. The freed activations of a run then stay in the heap, below later allocations, and the
    process takes up to twice their size. In this context, each block of 128 KiB or more has a memory mapping of its
    own, which is returned when it is freed. Afterwards only blocks of 32 MiB or more have one. Setting the threshold
    ends its automatic adaptation, so this is the value that glibc would have reached.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    set_parameter = getattr(libc, "mallopt", None) if _MALLOC_VARIABLES.isdisjoint(os.environ) else None
    trim_heap = getattr(libc, "malloc_trim", None)
    try:
        if set_parameter is not None:
            set_parameter(_MMAP_THRESHOLD, _CAPTURE_MMAP_BYTES)
        yield
    finally:
        if set_parameter is not None:
            set_parameter(_MMAP_THRESHOLD, _MAX_ADAPTIVE_MMAP_BYTES)
            set_parameter(_TRIM_THRESHOLD, 2 * _MAX_ADAPTIVE_MMAP_BYTES)  # as glibc adapts both
        if trim_heap is not None:
            trim_heap(0)


def run_in_one_stack_chunk(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function and all its calls in one chunk of Python's own stack.

    Python allocates a chunk of 16 KiB from the system when the frame of a call does not fit into the last chunk, and
    frees it when the call returns. If an inner loop of a trace calls functions at the end of a chunk, this takes a
    quarter of its time. The wrapper therefore declares a large frame, which it does not use, so that Python allocates a
    chunk with room for the calls inside. See https://github.com/python/cpython/issues/142183, fixed in newer versions
    of Python.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_STACK_SLOTS)  # type: ignore[attr-defined]
    return call
