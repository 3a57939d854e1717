"""Limits of the garbage collector, release of freed memory, and calls in one chunk of Python's stack."""

import ctypes
import gc
import platform
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clika_ref.capture.memory_limits import freeze_gc, release_freed_memory, run_in_one_stack_chunk


@pytest.fixture(autouse=True)
def _unfreeze_gc():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_freeze_gc_unfreezes_after_error():
    """Objects are frozen inside the context and unfrozen after an error."""

    def fail():
        with freeze_gc():
            assert gc.get_freeze_count() > 0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_freeze_gc_keeps_objects_frozen_before():
    """Objects that were frozen before stay frozen."""
    gc.freeze()
    with freeze_gc():
        pass
    assert gc.get_freeze_count() > 0


def measure_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the call")
def test_release_freed_memory_returns_memory_to_system():
    """Freed memory below a live block is returned to the system."""
    block = 100_000  # bytes: glibc takes what is below 128 KiB from its heap, and shrinks that from its end only
    with release_freed_memory():
        blocks = [torch.empty(block, dtype=torch.uint8).fill_(1) for _ in range(1000)]
        stays = torch.empty(block, dtype=torch.uint8).fill_(1)
        full = measure_resident_bytes()
        del blocks
    assert full - measure_resident_bytes() > 0.8 * 1000 * block
    assert stays.sum() == block


def test_release_freed_memory_trims_after_error(monkeypatch):
    """Memory is trimmed after an error too."""
    calls = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=calls.append))
    with pytest.raises(KeyError), release_freed_memory():
        raise KeyError
    assert calls == [0]


def count_most_faults(depths=400, calls=100):
    """Return the most page faults of calls at one depth of the stack; a call there leaves its stack chunk."""

    def do_nothing():
        return None

    def count_faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def descend(depth):
        before = count_faults()
        for _ in range(calls):
            do_nothing()
        met = count_faults() - before
        return max(met, descend(depth - 1)) if depth else met

    return descend(depths)


def test_run_in_one_stack_chunk_avoids_page_faults():
    """Calls below a function in one stack chunk allocate no other chunk."""
    assert run_in_one_stack_chunk(count_most_faults)() < 20


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="fixed in Python 3.13")
def test_python_stack_chunk_boundary_causes_page_faults():
    """If this fails, Python no longer needs `run_in_one_stack_chunk`."""
    assert count_most_faults() >= 100


def test_run_in_one_stack_chunk_keeps_name_and_result():
    """A wrapped function keeps its name, docstring, arguments and result."""

    @run_in_one_stack_chunk
    def double(number, *, times=1):
        """Return ``number * 2 ** times``."""
        return number * 2**times

    assert double(3, times=2) == 12
    assert double.__name__ == "double"
    assert double.__doc__ == "Return ``number * 2 ** times``."
