"""Whether two samples of random results come from one distribution: bounds that hold for any, and for every size.

Draw ``i`` of the target is held against draw ``i`` of eager. Where both come from one distribution, the two may change
places without anything becoming more or less likely: so every difference ``d[i]`` has its sign by chance, and

    P(|sum d| >= z * sqrt(sum d**2)) <= 2 * exp(-z**2 / 2)

whatever the distribution and however few the draws. By the same symmetry the ``k`` draws of one side that lie beyond
all of the other's have a chance of at most ``2**-k``.

Source: Hoeffding, Probability Inequalities for Sums of Bounded Random Variables (1963), theorem 2, given every ``|d|``;
Efron, Student's t-Test Under Symmetry Conditions (1969), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from clika_ref_conformance.judging.rounding import is_float, ulp_of
from clika_ref_conformance.judging.special_values import EAGER_ULPS

FALSE_ALARM = 1e-10
"""The chance that two samples of one distribution are told apart: once in a million runs of a hundred comparisons."""

TESTS = 5
"""Of each number: its mean, and at both ends either side beyond the other."""

FEW_VALUES = 16
"""Integers are counted value by value where there are no more different ones."""


@dataclass(frozen=True)
class Numbers:
    """What is compared of a sample, ``values[draw, n]`` in float64, and how far rounding may take each."""

    values: torch.Tensor
    off: torch.Tensor

    def times(self, other: Numbers) -> Numbers:
        """Return the products."""
        off = self.values.abs() * other.off + other.values.abs() * self.off
        return Numbers(self.values * other.values, off)

    def flattened(self) -> Numbers:
        """Return ``asinh`` of the numbers: of a heavy tail the logarithm, which has moments that few draws show."""
        return Numbers(self.values.asinh(), self.off / (1 + self.values.square()).sqrt())

    def beside(self) -> Numbers:
        """Return every number in the place of the one before it."""
        return Numbers(self.values.roll(-1, 1), self.off.roll(-1, 1))

    def chosen(self, columns: torch.Tensor) -> Numbers:
        """Return some columns only."""
        return Numbers(self.values[:, columns], self.off[:, columns])

    def pooled(self, signs: torch.Tensor) -> Numbers:
        """Return one more column: the mean of each draw, every number times a sign."""
        values, off = (self.values * signs).mean(1, keepdim=True), self.off.mean(1, keepdim=True)
        return Numbers(torch.cat([self.values, values], 1), torch.cat([self.off, off], 1))


def difference(target: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str:
    """Say how two samples of the outputs of one call differ, each ``[draw, element]``; nothing where they do not."""
    compared = [(name, *_prepared(t, e)) for name, t, e in _compared(target, eager)]
    columns = sum(t.values.shape[1] for _, t, _ in compared)
    chance = FALSE_ALARM / max(TESTS * columns, 1)
    return next((text for name, t, e in compared if (text := _told_apart(name, t, e, chance))), "")


def _prepared(target: Numbers, eager: Numbers) -> tuple[Numbers, Numbers]:
    """Leave out what is not finite in any draw; add the mean over all elements, which strays less than each.

    Elements are turned to a positive sum before, so that they do not cancel. Both follow from the two samples together,
    so that exchanging draws changes neither.
    """
    finite = (target.values.isfinite() & eager.values.isfinite()).all(0)
    target, eager = target.chosen(finite), eager.chosen(finite)
    if target.values.shape[1] < 2:
        return target, eager
    signs = (target.values + eager.values).sum(0).sign()
    return target.pooled(signs), eager.pooled(signs)


def _told_apart(name: str, target: Numbers, eager: Numbers, chance: float) -> str:
    """Say which mean or end of some numbers differs by more than a chance explains."""
    t, e, off = target.values, eager.values, torch.maximum(target.off, eager.off)
    z = math.sqrt(2 * math.log(2 / chance))
    step = t - e
    allowed = z * step.square().sum(0).sqrt() + off.sum(0)
    wrong = (step.sum(0).abs() > allowed).nonzero()
    if len(wrong):
        at, count = int(wrong[0]), len(t)
        return (
            f"the mean of {name} is {float(t[:, at].mean()):.5g} instead of {float(e[:, at].mean()):.5g} "
            f"at {at}; {count} draws explain a difference of {float(allowed[at]) / count:.2g}"
        )
    most, slack = -math.log2(chance), off.amax(0) if len(off) else off
    for end, sign in (("above the largest", 1), ("below the least", -1)):
        for whose, a, other, b in (("the target", t, "eager", e), ("eager", e, "the target", t)):
            beyond = (sign * a > (sign * b).amax(0) + slack).sum(0)
            if bool((beyond > most).any()):
                at = int(beyond.argmax())
                return f"{int(beyond[at])} of {len(t)} draws of {name} by {whose} lie {end} by {other}, at {at}"
    return ""


def _compared(target: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> Iterator[tuple[str, Numbers, Numbers]]:
    """Yield numbers that tell distributions apart, of both sides: moments, neighbours, extremes, counts, outputs."""
    beside: list[tuple[Numbers, Numbers]] = []
    for index, pair in enumerate(zip(target, eager, strict=True)):
        name = f"output {index}"
        t, e = (_numbers(side) for side in pair)
        if not t.values.numel():
            continue
        yield name, t, e
        yield f"{name} squared", t.times(t), e.times(e)
        t, e = t.flattened(), e.flattened()
        yield f"asinh of {name}", t, e
        yield f"asinh of {name} squared", t.times(t), e.times(e)
        if t.values.shape[1] > 1:
            yield f"extremes of each {name}", _extremes(t), _extremes(e)
        centre = (t.values + e.values).mean(0) / 2  # of both, so that exchanging draws does not move it
        t, e = Numbers(t.values - centre, t.off), Numbers(e.values - centre, e.off)
        if t.values.shape[1] > 1:
            yield f"products of neighbours in {name}", t.times(t.beside()), e.times(e.beside())
        if not is_float(pair[0]):
            yield from _counted(name, *pair)
        for u, f in beside:
            if u.values.shape == t.values.shape:
                yield f"products of {name} and one before", t.times(u), e.times(f)
        beside.append((t, e))


def _numbers(results: torch.Tensor) -> Numbers:
    values = results.double()
    return Numbers(
        values, EAGER_ULPS * ulp_of(values, results.dtype) if is_float(results) else torch.zeros_like(values)
    )


def _extremes(numbers: Numbers) -> Numbers:
    """Return the least and the largest number of each draw."""
    ends = [numbers.values.amin(1), numbers.values.amax(1)]
    return Numbers(torch.stack(ends, 1), numbers.off.amax(1, keepdim=True).expand(-1, 2))


def _counted(name: str, target: torch.Tensor, eager: torch.Tensor) -> Iterator[tuple[str, Numbers, Numbers]]:
    """Yield where integers are one value, of few, and where neighbours are equal: in a permutation none are."""
    few = torch.cat([target, eager]).unique()
    if len(few) <= FEW_VALUES:
        for value in few:
            yield f"{name} == {value.item()}", _indicator(target == value), _indicator(eager == value)
    if target.shape[1] > 1:
        t, e = (_indicator(side == side.roll(-1, 1)) for side in (target, eager))
        yield f"equal neighbours in {name}", t, e


def _indicator(where: torch.Tensor) -> Numbers:
    return Numbers(where.double(), torch.zeros(where.shape, dtype=torch.float64))
