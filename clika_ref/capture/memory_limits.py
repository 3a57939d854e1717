"""Limit the memory and time of a capture: configure the garbage collector, the C heap and Python's stack."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_STACK_SLOTS = 2**16
"""Slots of 8 bytes. Python rounds the chunk up to 1 MiB, so that 480 KiB remain for about a thousand nested calls."""


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Limit the garbage collector to objects created in the context.

    A trace creates so many objects that the collector would search all of PyTorch and the model repeatedly, which takes
    up to half of the capture time. Imports, the other stages and exports cause one such search each, of 0.1 to 0.3 s.
    If objects are frozen already, this does nothing, since ``gc.unfreeze`` would unfreeze these, too.
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
    """Return memory that was freed in the context to the system, on C libraries with a call for it (glibc).

    glibc keeps freed blocks in its heap for later allocations, and the activations of a run are large.
    """
    try:
        yield
    finally:
        libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
        trim_heap = getattr(libc, "malloc_trim", None)
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
