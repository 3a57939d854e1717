"""A long trace reports the current line of the model, and other output stays visible."""

import inspect
import re
import sys
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch.utils import _pytree as pytree

from clika_ref.capture import line_sampling
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ModelCall, make_call
from clika_ref.capture.line_sampling import LONG_TRACE_SAMPLES, find_slow_line, innermost_model_line, sample_lines
from clika_ref.capture.tracers import TRACERS, Tracer, trace


def test_sample_lines_shows_and_counts_current_line():
    """The current line of a thread is shown and counted."""
    shown, seen = [], threading.Event()

    def record_progress(text):
        shown.append(text)
        seen.set()

    with sample_lines("tracing", record_progress) as lines:
        assert seen.wait(timeout=60)
    assert re.fullmatch(r"tracing, at test_line_sampling\.py:\d+", shown[0])
    assert shown[0].removeprefix("tracing, at ") in lines


def test_sample_lines_thread_stops_after_error():
    """The sampling thread stops with its context."""

    def fail():
        with sample_lines("tracing", lambda _: None):
            assert threading.active_count() == before + 1
            raise KeyError

    before = threading.active_count()
    with pytest.raises(KeyError):
        fail()
    assert threading.active_count() == before


def test_innermost_model_line_skips_pytorch_and_stdlib():
    """Lines of PyTorch and of the standard library are skipped."""
    found = []

    class Model(torch.nn.Module):
        def forward(self, x):
            sorted([1], key=lambda _: found.append(innermost_model_line(inspect.currentframe())))
            return x

    torch.nn.Sequential(Model())(torch.ones(1))
    pytree.tree_map(lambda _: found.append(innermost_model_line(inspect.currentframe().f_back)), [1])
    assert [f.partition(":")[0] for f in found] == ["test_line_sampling.py"] * 2
    assert innermost_model_line(None) is None


def test_innermost_model_line_skips_calls_of_this_package():
    """A line that calls this package is skipped."""
    found = []
    callee = make_callable(torch.nn.Identity())
    make_call(callee, 1, transform=lambda _: found.append(innermost_model_line(inspect.currentframe().f_back)))
    assert found == [None]


def test_find_slow_line_needs_long_trace():
    """Only a long trace reports its slowest line."""
    assert find_slow_line(Counter({"model.py:7": LONG_TRACE_SAMPLES - 1})) is None
    assert (
        find_slow_line(Counter({"model.py:7": LONG_TRACE_SAMPLES // 2, "model.py:9": LONG_TRACE_SAMPLES}))
        == "model.py:9 (68% of the tracing)"
    )


def test_trace_silences_current_thread_only(capsys):
    """A tracer is silent, and other threads still write."""

    def run(_module, _call, _shapes):
        other = threading.Thread(target=lambda: sys.stderr.write("progress"))
        sys.stdout.write("noise")
        sys.stderr.write("noise")
        other.start()
        other.join()

    trace(Tracer("loud", run, oblivious=TRACERS[0].oblivious), torch.nn.Identity(), ModelCall((), {}), None)
    assert tuple(capsys.readouterr()) == ("", "progress")


def test_sample_lines_keeps_no_frame_alive(monkeypatch):
    """A sample keeps no object of the model alive."""
    monkeypatch.setattr(line_sampling, "SAMPLING_INTERVAL_S", 0.001)
    seen = threading.Event()

    def slow_down_sampling(_: str) -> None:
        line_sampling.SAMPLING_INTERVAL_S = 60  # no second look, which would let go of the first
        seen.set()

    class Kept:
        pass

    def work() -> weakref.ref:
        held = Kept()
        assert seen.wait(30)
        return weakref.ref(held)

    with line_sampling.sample_lines("working", slow_down_sampling):
        assert work()() is None
