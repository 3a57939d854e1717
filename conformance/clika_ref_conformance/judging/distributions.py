"""Compare two samples of random results, with bounds that hold for any distribution and any sample size.

Draw ``i`` of the target is compared with draw ``i`` of eager. If both have the same distribution, exchanging the two
changes no probability. So every difference ``d[i]`` has a random sign, and

    P(|sum d| >= z * sqrt(sum d**2)) <= 2 * exp(-z**2 / 2)

for any distribution and any number of draws. By the same symmetry, the probability that ``k`` draws of one sample are
all beyond every draw of the other is at most ``2**-k``.

Source: Hoeffding, Probability Inequalities for Sums of Bounded Random Variables (1963), theorem 2, given every ``|d|``;
Efron, Student's t-Test Under Symmetry Conditions (1969), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from clika_ref_conformance.judging.expected_output import EAGER_ULPS
from clika_ref_conformance.judging.rounding import is_float, ulp_of

FALSE_ALARM_PROBABILITY = 1e-10
"""Probability of a false alarm for equal distributions: once in a million runs of a hundred comparisons."""

TESTS_PER_NUMBER = 5
"""Tests per number: its mean, and at both tails either sample beyond the other."""

MAX_COUNTED_VALUES = 16
"""Integers are counted by value if they have at most this many distinct values."""


@dataclass(frozen=True)
class SampleNumbers:
    """Numbers to compare from a sample, ``values[draw, n]`` in float64, and the rounding error of each."""

    values: torch.Tensor
    rounding_error: torch.Tensor

    def multiply(self, other: SampleNumbers) -> SampleNumbers:
        """Return the elementwise products."""
        off = self.values.abs() * other.rounding_error + other.values.abs() * self.rounding_error
        return SampleNumbers(self.values * other.values, off)

    def asinh(self) -> SampleNumbers:
        """Return ``asinh`` of the numbers: about the logarithm of heavy tails, with moments that few draws show."""
        return SampleNumbers(self.values.asinh(), self.rounding_error / (1 + self.values.square()).sqrt())

    def shift(self) -> SampleNumbers:
        """Return every number shifted to the position of its predecessor."""
        return SampleNumbers(self.values.roll(-1, 1), self.rounding_error.roll(-1, 1))

    def select(self, columns: torch.Tensor) -> SampleNumbers:
        """Return a selection of columns."""
        return SampleNumbers(self.values[:, columns], self.rounding_error[:, columns])

    def append_mean(self, signs: torch.Tensor) -> SampleNumbers:
        """Append one column: the mean of each draw, with every number multiplied by a sign."""
        values, off = (self.values * signs).mean(1, keepdim=True), self.rounding_error.mean(1, keepdim=True)
        return SampleNumbers(torch.cat([self.values, values], 1), torch.cat([self.rounding_error, off], 1))


def describe_difference(target: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str:
    """Describe how two samples of one call's outputs, each ``[draw, element]``, differ; empty if they do not."""
    compared = [(name, *_prepare(t, e)) for name, t, e in _compute_statistics(target, eager)]
    columns = sum(t.values.shape[1] for _, t, _ in compared)
    chance = FALSE_ALARM_PROBABILITY / max(TESTS_PER_NUMBER * columns, 1)
    return next((text for name, t, e in compared if (text := _describe_outlier(name, t, e, chance))), "")


def _prepare(target: SampleNumbers, eager: SampleNumbers) -> tuple[SampleNumbers, SampleNumbers]:
    """Drop elements that are not finite in every draw; append their mean, which has less variance.

    Elements first get the sign that makes their sum positive, so that they do not cancel. Both steps are symmetric in
    the two samples, so exchanging draws changes neither.
    """
    finite = (target.values.isfinite() & eager.values.isfinite()).all(0)
    target, eager = target.select(finite), eager.select(finite)
    if target.values.shape[1] < 2:
        return target, eager
    signs = (target.values + eager.values).sum(0).sign()
    return target.append_mean(signs), eager.append_mean(signs)


def _describe_outlier(name: str, target: SampleNumbers, eager: SampleNumbers, chance: float) -> str:
    """Describe the first mean or tail that differs by more than chance explains."""
    t, e, off = target.values, eager.values, torch.maximum(target.rounding_error, eager.rounding_error)
    z = math.sqrt(2 * math.log(2 / chance))
    step = t - e
    allowed = z * step.square().sum(0).sqrt() + off.sum(0)
    wrong = (step.sum(0).abs() > allowed).nonzero()
    if len(wrong):
        at, count = int(wrong[0]), len(t)
        return (
            f"the mean of {name} is {float(t[:, at].mean()):.5g} instead of {float(e[:, at].mean()):.5g} "
            f"at {at}; {count} draws explain a difference of up to {float(allowed[at]) / count:.2g}"
        )
    most, slack = -math.log2(chance), off.amax(0) if len(off) else off
    for end, sign in (("above the maximum", 1), ("below the minimum", -1)):
        for source, a, other, b in (("the target", t, "eager", e), ("eager", e, "the target", t)):
            beyond = (sign * a > (sign * b).amax(0) + slack).sum(0)
            if bool((beyond > most).any()):
                at = int(beyond.argmax())
                return f"{int(beyond[at])} of {len(t)} draws of {name} by {source} are {end} by {other}, at {at}"
    return ""


def _compute_statistics(
    target: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]
) -> Iterator[tuple[str, SampleNumbers, SampleNumbers]]:
    """Yield numbers of both samples that distinguish distributions: moments, neighbors, min/max, counts, outputs."""
    earlier: list[tuple[SampleNumbers, SampleNumbers]] = []
    for index, pair in enumerate(zip(target, eager, strict=True)):
        name = f"output {index}"
        t, e = (_to_numbers(sample) for sample in pair)
        if not t.values.numel():
            continue
        yield name, t, e
        yield f"{name} squared", t.multiply(t), e.multiply(e)
        t, e = t.asinh(), e.asinh()
        yield f"asinh of {name}", t, e
        yield f"asinh of {name} squared", t.multiply(t), e.multiply(e)
        if t.values.shape[1] > 1:
            yield f"min/max of each {name}", _min_and_max(t), _min_and_max(e)
        centre = (t.values + e.values).mean(0) / 2  # of both samples, so that exchanging draws does not change it
        t, e = SampleNumbers(t.values - centre, t.rounding_error), SampleNumbers(e.values - centre, e.rounding_error)
        if t.values.shape[1] > 1:
            yield f"products of neighbors in {name}", t.multiply(t.shift()), e.multiply(e.shift())
        if not is_float(pair[0]):
            yield from _count_values(name, *pair)
        for u, f in earlier:
            if u.values.shape == t.values.shape:
                yield f"products of {name} and an earlier output", t.multiply(u), e.multiply(f)
        earlier.append((t, e))


def _to_numbers(results: torch.Tensor) -> SampleNumbers:
    values = results.double()
    return SampleNumbers(
        values, EAGER_ULPS * ulp_of(values, results.dtype) if is_float(results) else torch.zeros_like(values)
    )


def _min_and_max(numbers: SampleNumbers) -> SampleNumbers:
    """Return the minimum and the maximum of each draw."""
    ends = [numbers.values.amin(1), numbers.values.amax(1)]
    return SampleNumbers(torch.stack(ends, 1), numbers.rounding_error.amax(1, keepdim=True).expand(-1, 2))


def _count_values(
    name: str, target: torch.Tensor, eager: torch.Tensor
) -> Iterator[tuple[str, SampleNumbers, SampleNumbers]]:
    """Yield indicators of integers with few distinct values, and of equal neighbors: a permutation has none."""
    few = torch.cat([target, eager]).unique()
    if len(few) <= MAX_COUNTED_VALUES:
        for value in few:
            yield f"{name} == {value.item()}", _make_indicator(target == value), _make_indicator(eager == value)
    if target.shape[1] > 1:
        t, e = (_make_indicator(sample == sample.roll(-1, 1)) for sample in (target, eager))
        yield f"equal neighbors in {name}", t, e


def _make_indicator(where: torch.Tensor) -> SampleNumbers:
    return SampleNumbers(where.double(), torch.zeros(where.shape, dtype=torch.float64))
