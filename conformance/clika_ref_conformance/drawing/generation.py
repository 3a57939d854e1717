"""Hypothesis as a generator: values of a strategy, the same for a seed, and the smallest of them that fails."""

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

BEFORE_MUTATION = 10
"""So many valid values a health check of Hypothesis wants to see first."""


def collect(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Return ``count`` values of a strategy, the same for the same seed, or fewer where it has no more to give."""
    found: list[T] = []
    if count > 0:
        _generate(strategy, count, seed, found.append, (Phase.generate,))
    return found[:count]


def collect_apart(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """Return ``count`` values as `collect` does, none of which is made of another one by few changes.

    Behind `BEFORE_MUTATION` values Hypothesis draws half of what follows in that way, so it starts again there; each
    time it starts with the plainest value, which is wanted once.
    """
    found: list[T] = []
    for turn in range(count):
        if len(found) >= count:
            break
        found += collect(strategy, min(BEFORE_MUTATION, count), seed + turn)[min(turn, 1) :]
    return found[:count]


def shrink(strategy: SearchStrategy[T], count: int, seed: int, fails: Callable[[T], bool], seconds: float) -> T | None:
    """Return the smallest value found that fails: `collect` is run again, and what fails is made smaller.

    None where none of the ``count`` values fails any more. After ``seconds`` nothing is tried any more, and the
    smallest so far is returned.
    """
    smallest: list[T] = []
    end = time.monotonic() + seconds

    def check(value: T) -> None:
        if time.monotonic() < end and fails(value):
            smallest[:] = [value]
            raise _Found

    # A value that stops failing because time is up is "flaky" to Hypothesis.
    with contextlib.suppress(_Found, HypothesisException, ExceptionGroup):
        _generate(strategy, count, seed, check, (Phase.generate, Phase.shrink))
    return smallest[0] if smallest else None


class _Found(Exception):  # noqa: N818 - no error: what is looked for
    """Tells Hypothesis that a value fails."""


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
    def each(value: T) -> None:
        take(value)

    each()
