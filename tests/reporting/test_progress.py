"""``SimpleProgressBar``: its items, its display, and the cases without a display."""

import io
import re

import pytest
from rich.console import Console

from clika_ref.core.errors import ModelError
from clika_ref.reporting import progress
from clika_ref.reporting.progress import SimpleProgressBar

pytestmark = pytest.mark.usefixtures("_console_output")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets by hand."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_simple_progress_bar_yields_elements_and_prints_line(capsys, clock):
    """The bar yields the elements, and prints one line if stderr is no terminal."""
    seen = []
    for element in SimpleProgressBar([3, 1, 2], desc="Calibrating [b, 3]"):
        clock.now += 2
        seen.append(element)
    assert seen == [3, 1, 2]
    assert capsys.readouterr() == ("", "Calibrating [b, 3]  3/3  6.0 s  0.50 it/s\n")


def test_simple_progress_bar_generator_has_no_total(capsys, clock):
    """A generator has no total, and `len` raises an error."""
    bar = SimpleProgressBar((i for i in range(2000)), unit="image")
    for _ in bar:
        clock.now += 0.001
    assert capsys.readouterr().err == "2,000  2.0 s  1,000.00 image/s\n"
    with pytest.raises(TypeError, match=r"the iterable of SimpleProgressBar\(''\) has no length\. Pass total="):
        len(bar)


def test_simple_progress_bar_raising_len_counts_as_unknown():
    """A length that raises TypeError counts as unknown."""

    class Stream:
        def __iter__(self):
            return iter("ab")

        def __len__(self):
            message = "an iterable data set has no length"
            raise TypeError(message)

    assert list(SimpleProgressBar(Stream(), disable=True)) == ["a", "b"]


def test_simple_progress_bar_manual_update(capsys, clock):
    """The bar is updated by hand."""
    with SimpleProgressBar(total=1000, desc="Downloading") as bar:
        clock.now += 1
        bar.update(600)
        bar.update()
    assert len(bar) == 1000
    assert capsys.readouterr().err == "Downloading  601/1,000  1.0 s  601.00 it/s\n"


def test_simple_progress_bar_update_starts_bar(capsys):
    """`update` starts a bar, and `close` may be called twice."""
    bar = SimpleProgressBar(total=2)
    bar.update(2)
    bar.close()
    bar.close()
    assert re.fullmatch(r"2/2  .* it/s\n", capsys.readouterr().err)


def test_simple_progress_bar_break_or_error_ends_bar(capsys):
    """A break or an error ends the bar."""
    message = "the loop's own"
    for _ in SimpleProgressBar([1, 2, 3], desc="broken off"):
        break
    with pytest.raises(ValueError, match=message), SimpleProgressBar([1, 2, 3], desc="failed"):
        raise ValueError(message)
    lines = capsys.readouterr().err.splitlines()
    assert [line[: line.index("/3")] for line in lines] == ["broken off  0", "failed  0"]


def test_simple_progress_bar_iterated_twice(capsys):
    """The bar can be iterated twice."""
    bar = SimpleProgressBar([1, 2])
    assert list(bar) == list(bar) == [1, 2]
    assert capsys.readouterr().err.count("2/2") == 2


@pytest.mark.parametrize("how", ["disable", "environment"])
def test_simple_progress_bar_disabled_prints_no_line(capsys, monkeypatch, how):
    """`disable` and `CLIKA_REF_QUIET` silence the bar."""
    monkeypatch.setenv("CLIKA_REF_QUIET", "1" if how == "environment" else "0")
    assert list(SimpleProgressBar([1], disable=how == "disable")) == [1]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [4, None])
def test_simple_progress_bar_terminal_shows_count_time_rate(monkeypatch, total):
    """A terminal shows the bar, count, time and rate."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "progress_console", lambda: console)
    with SimpleProgressBar(total=total, desc="Calibrating") as bar:
        bar.update(3)
    last = stream.getvalue().splitlines()[-2]
    count = "3/4" if total else "3"
    assert re.search(rf"Calibrating +[━╸╺ ]+ +{count}  (\d+|< 1) ms  [\d,.]+ it/s", last), last
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_simple_progress_bar_number_raises_with_remedy():
    """A number raises an error that suggests `total=`."""
    with pytest.raises(
        ModelError, match=r"SimpleProgressBar\(20\): a int is not iterable\. For a bar .* pass total=20"
    ):
        SimpleProgressBar(20)
    with pytest.raises(ModelError, match=r"SimpleProgressBar\(2\.5\): a float is not iterable\.$"):
        SimpleProgressBar(2.5)


def test_simple_progress_bar_negative_total_raises():
    """A negative total raises an error."""
    with pytest.raises(
        ModelError, match=r"SimpleProgressBar\(total=-1\): it is negative\. Give the number of elements, or None"
    ):
        SimpleProgressBar(total=-1)


def test_simple_progress_bar_without_iterable_raises():
    """Iteration without an iterable raises an error with the remedy."""
    with pytest.raises(ModelError, match=r"it has no iterable\. Pass one, or call update\(\)"):
        list(SimpleProgressBar(total=3))
