"""Hypothesis as a generator: reproducible values of a strategy, and shrinking of values that fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

EXAMPLES_BEFORE_MUTATION = 10
"""Number of valid examples that a Hypothesis health check requires before it mutates any."""


def collect(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Return ``count`` values of a strategy, or fewer if it has no more; the same seed gives the same values."""
    found: list[T] = []
    if count > 0:
        _generate(strategy, count, seed, found.append, (Phase.generate,))
    return found[:count]


def collect_without_mutations(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Return ``count`` values like `collect`, but no value is a small mutation of another one.

    After `EXAMPLES_BEFORE_MUTATION` examples, Hypothesis creates half of the examples by mutation. Generation therefore
    restarts there with another seed. Each restart begins with the simplest value, which is kept only once.
    """
    found: list[T] = []
    for turn in range(count):
        if len(found) >= count:
            break
        found += collect(strategy, min(EXAMPLES_BEFORE_MUTATION, count), seed + turn)[min(turn, 1) :]
    return found[:count]


def shrink(strategy: SearchStrategy[T], count: int, seed: int, fails: Callable[[T], bool], seconds: float) -> T | None:
    """Run `collect` again and return the smallest failing value found, or None if no value fails.

    The search stops after ``seconds`` and returns the smallest value so far.
    """
    smallest: list[T] = []
    end = time.monotonic() + seconds

    def check(value: T) -> None:
        if time.monotonic() < end and fails(value):
            smallest[:] = [value]
            raise _FailureFound

    # Hypothesis reports a value as flaky if it stops failing because the time is up.
    with contextlib.suppress(_FailureFound, HypothesisException, ExceptionGroup):
        _generate(strategy, count, seed, check, (Phase.generate, Phase.shrink))
    return smallest[0] if smallest else None


class _FailureFound(Exception):  # noqa: N818 - a signal, not an error
    """Signals to Hypothesis that a value fails."""


def _generate(
    strategy: SearchStrategy[T], count: int, seed: int, take: Callable[[T], Any], phases: tuple[Phase, ...]
) -> None:
    @seeded(seed)
    @settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType] - an enum with a metaclass
    )
    @given(strategy)
    def run_example(value: T) -> None:
        take(value)

    run_example()
