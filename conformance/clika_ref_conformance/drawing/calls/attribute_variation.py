"""Pairs of legal calls that differ in one decision of the sampler, which shows the effect of one attribute."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Choice, Draw, FloatRange, IntegerRange, random_draw
from clika_ref_conformance.drawing.sampling import SampleError, draw_call

Decisions = Sequence[tuple[Any, Any]]
"""The descriptions that a sampler drew from and the values it got, in order."""


@dataclass(frozen=True)
class RecordedCall:
    """A drawn call and the decisions that led to it."""

    call: Call
    decisions: Decisions


def record_call(op: Operator, seed: str) -> RecordedCall:
    """Return a random call; the same seed gives the same call.

    Raises:
        SampleError: the sampler raises. Its details include the values drawn before.
    """
    decisions: list[tuple[Any, Any]] = []
    decide = random_draw(random.Random(seed))  # noqa: S311 - no secret

    def draw(description: Any, /) -> Any:
        value = decide(description)
        decisions.append((description, value))
        return value

    try:
        return RecordedCall(draw_call(op, draw), decisions)
    except SampleError as error:
        error.details += f", after drawing {', '.join(repr(value) for _, value in decisions) or 'nothing'}"
        raise


def vary_single_attributes(op: Operator, traced: RecordedCall) -> Iterator[tuple[str, Call]]:
    """Yield each call that differs in a single attribute, with the attribute's name; operands are unchanged."""
    for at, (description, value) in enumerate(traced.decisions):
        for other in _list_alternatives(description, value):
            try:
                call = draw_call(op, _replay(traced.decisions, at, other))
            except SampleError:  # the other decision does not fit the earlier ones
                continue
            names = [n for n, v in call.attrs.items() if _is_different(v, traced.call.attrs[n])]
            if len(names) == 1 and not any(map(_is_different, call.operands, traced.call.operands)):
                yield names[0], call


def _replay(decisions: Decisions, at: int, other: Any) -> Draw:
    """Return a driver that repeats all decisions but one; decisions without a predecessor are random."""
    fresh = random_draw(random.Random(at))  # noqa: S311 - no secret
    rest = iter(range(len(decisions)))

    def draw(description: Any, /) -> Any:
        index = next(rest, len(decisions))
        if index == at:
            return other
        same = index < len(decisions) and decisions[index][0] == description
        return decisions[index][1] if same else fresh(description)

    return draw


def _list_alternatives(description: Any, value: Any) -> list[Any]:
    match description:
        case Choice(options):
            offered = list(options)
        case IntegerRange(low, high):
            offered = [low, high, (low + high) // 2]
        case FloatRange(low, high):
            offered = [low, high, (low + high) / 2]
        case _:
            offered = []
    return [o for o in offered if _is_different(o, value)]


def _is_different(a: Any, b: Any) -> bool:
    """Return whether two values differ in value or type: 1, 1.0 and True all differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype != b.dtype or not torch.equal(a, b)
    return (type(a), repr(a)) != (type(b), repr(b))
