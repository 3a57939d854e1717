"""The garbage collector is spared what exists already, and freed memory goes back to the system."""

import ctypes
import gc
import platform
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clika_ref.capture.memory import spared, trimmed


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_are_frozen_while_the_context_lasts_and_thawed_after_an_error():
    def fail():
        with spared():
            assert gc.get_freeze_count() > 0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    with spared():
        pass
    assert gc.get_freeze_count() > 0


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the call")
def test_what_is_freed_below_something_that_stays_goes_back_to_the_system():
    block = 100_000  # bytes: glibc takes what is below 128 KiB from its heap, and shrinks that from its end only
    with trimmed():
        blocks = [torch.empty(block, dtype=torch.uint8).fill_(1) for _ in range(1000)]
        stays = torch.empty(block, dtype=torch.uint8).fill_(1)
        full = resident_bytes()
        del blocks
    assert full - resident_bytes() > 0.8 * 1000 * block
    assert stays.sum() == block


def test_memory_is_given_back_after_an_error_too(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=calls.append))
    with pytest.raises(KeyError), trimmed():
        raise KeyError
    assert calls == [0]
