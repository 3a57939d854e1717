"""A long trace reports its lines of the model, and other output stays visible."""

import sys
import threading
from traceback import FrameSummary

import torch

from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.line_times import LONG_TRACE_S, PROGRESS_INTERVAL_S, LineTimes
from clika_ref.capture.tracers import TRACERS, Tracer, trace

CALL = ModelCall((torch.ones(2, 3),), {})


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_times():
    """Return an empty record of lines, its clock, and the list of the progress shown."""
    clock, shown = Clock(), []
    return LineTimes("tracing", shown.append, clock), clock, shown


def reach(times, clock, *visits):
    """Reach lines of a model, and spend some seconds at each."""
    for line, seconds in visits:
        times.reach(FrameSummary("/home/user/model.py", line, "forward"))
        clock.now += seconds


def test_reach_shows_lines_at_most_every_interval():
    """The current line is shown, but not more often than every interval."""
    times, clock, shown = make_times()
    reach(times, clock, *((line, 0.6 * PROGRESS_INTERVAL_S) for line in range(1, 8)))
    assert shown == ["tracing, at model.py:3", "tracing, at model.py:5", "tracing, at model.py:7"]


def test_find_slow_line_needs_long_trace():
    """Only a long trace has a slow line, with its share of the time."""
    times, clock, _ = make_times()
    reach(times, clock, (7, LONG_TRACE_S / 2), (9, LONG_TRACE_S / 4), (7, 0))
    assert times.find_slow_line() is None
    reach(times, clock, (7, LONG_TRACE_S), (9, 0))
    assert times.find_slow_line() == "model.py:7 (86% of the tracing)"


def test_trace_reaches_lines_of_calls_and_guards():
    """Each call and each guard reaches its line of the model, not one of PyTorch."""

    class Model(torch.nn.Module):
        def forward(self, x):
            y = x.relu()
            if x.shape[0] > 4:
                y = y + 1
            return torch.nn.functional.softmax(y, -1)

    reached = []
    shapes = {"x": {0: torch.export.Dim.AUTO}}
    trace(TRACERS[0], Model(), ModelCall((torch.ones(6, 3),), {}), shapes, reach=reached.append)
    first = Model.forward.__code__.co_firstlineno
    assert {frame.filename for frame in reached} == {__file__}
    assert list(dict.fromkeys(frame.lineno - first for frame in reached)) == [1, 2, 3, 4]


def test_trace_silences_current_thread_only(capsys):
    """A tracer is silent, and other threads still write."""

    def run(_module, _call, _shapes):
        other = threading.Thread(target=lambda: sys.stderr.write("progress"))
        sys.stdout.write("noise")
        sys.stderr.write("noise")
        other.start()
        other.join()

    trace(Tracer("loud", run, oblivious=TRACERS[0].oblivious), torch.nn.Identity(), CALL, None)
    assert tuple(capsys.readouterr()) == ("", "progress")
