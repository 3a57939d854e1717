"""``SimpleProgressBar``: what it yields, what it shows, and where it stays silent."""

import io
import re

import pytest
from rich.console import Console

from clika_ref.core.errors import ModelError
from clika_ref.reporting import progress
from clika_ref.reporting.progress import SimpleProgressBar


@pytest.fixture(autouse=True)
def audible(monkeypatch):
    monkeypatch.delenv("CLIKA_REF_QUIET", raising=False)


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


def test_it_yields_the_elements_and_leaves_one_line_off_a_terminal(capsys, clock):
    seen = []
    for element in SimpleProgressBar([3, 1, 2], desc="Calibrating [b, 3]"):
        clock.now += 2
        seen.append(element)
    assert seen == [3, 1, 2]
    assert capsys.readouterr() == ("", "Calibrating [b, 3]  3/3  6.0 s  0.50 it/s\n")


def test_a_generator_has_no_total(capsys, clock):
    bar = SimpleProgressBar((i for i in range(2000)), unit="image")
    for _ in bar:
        clock.now += 0.001
    assert capsys.readouterr().err == "2,000  2.0 s  1,000.00 image/s\n"
    with pytest.raises(TypeError, match=r"the iterable of SimpleProgressBar\(''\) has no length; pass total="):
        len(bar)


def test_a_length_that_refuses_counts_as_unknown():
    class Stream:
        def __iter__(self):
            return iter("ab")

        def __len__(self):
            message = "an iterable data set has no length"
            raise TypeError(message)

    assert list(SimpleProgressBar(Stream(), disable=True)) == ["a", "b"]


def test_it_is_moved_by_hand(capsys, clock):
    with SimpleProgressBar(total=1000, desc="Downloading") as bar:
        clock.now += 1
        bar.update(600)
        bar.update()
    assert len(bar) == 1000
    assert capsys.readouterr().err == "Downloading  601/1,000  1.0 s  601.00 it/s\n"


def test_update_starts_a_bar_that_nobody_started(capsys):
    bar = SimpleProgressBar(total=2)
    bar.update(2)
    bar.close()
    bar.close()
    assert re.fullmatch(r"2/2  .* it/s\n", capsys.readouterr().err)


def test_leaving_the_loop_early_or_by_an_error_ends_the_bar(capsys):
    message = "the loop's own"
    for _ in SimpleProgressBar([1, 2, 3], desc="broken off"):
        break
    with pytest.raises(ValueError, match=message), SimpleProgressBar([1, 2, 3], desc="failed"):
        raise ValueError(message)
    lines = capsys.readouterr().err.splitlines()
    assert [line[: line.index("/3")] for line in lines] == ["broken off  0", "failed  0"]


def test_it_can_be_iterated_twice(capsys):
    bar = SimpleProgressBar([1, 2])
    assert list(bar) == list(bar) == [1, 2]
    assert capsys.readouterr().err.count("2/2") == 2


@pytest.mark.parametrize("how", ["disable", "environment"])
def test_it_can_be_silenced(capsys, monkeypatch, how):
    monkeypatch.setenv("CLIKA_REF_QUIET", "1" if how == "environment" else "0")
    assert list(SimpleProgressBar([1], disable=how == "disable")) == [1]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [4, None])
def test_a_terminal_shows_bar_count_time_and_rate(monkeypatch, total):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "progress_console", lambda: console)
    with SimpleProgressBar(total=total, desc="Calibrating") as bar:
        bar.update(3)
    last = stream.getvalue().splitlines()[-2]
    count = "3/4" if total else "3"
    assert re.search(rf"Calibrating +[━╸╺ ]+ +{count}  (\d+|< 1) ms  [\d,.]+ it/s", last), last
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_number_is_no_iterable_and_the_message_says_what_to_write():
    with pytest.raises(
        ModelError, match=r"SimpleProgressBar\(20\): a int cannot be iterated over; for a bar .* write total=20"
    ):
        SimpleProgressBar(20)
    with pytest.raises(ModelError, match=r"SimpleProgressBar\(2\.5\): a float cannot be iterated over$"):
        SimpleProgressBar(2.5)


def test_a_total_below_zero_is_refused():
    with pytest.raises(ModelError, match=r"SimpleProgressBar\(total=-1\): give the number of elements, or None"):
        SimpleProgressBar(total=-1)


def test_iterating_without_an_iterable_says_what_to_do():
    with pytest.raises(ModelError, match=r"without an iterable: pass one, or call update\(\)"):
        list(SimpleProgressBar(total=3))
