"""Verdicts on the items of the plan, and the measurements of the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of one item of the plan. Every item gets exactly one, so that the counts add up to the plan."""

    PASS = "pass"  # noqa: S105 - a verdict, not a secret
    DEVIATION = "deviation:declared"
    """The target differs from eager exactly as it declares."""
    UNSUPPORTED = "unsupported:declared"
    """The target rejects the node with a reason, before anything is compiled."""
    XFAIL = "xfail"
    UNSTABLE = "reference_unstable"
    """Eager itself exceeds the bound, so there is no reference to compare the target with."""
    NOT_RUN = "not-run"
    """The check was not run. The message gives the reason, and its `Reason` the category."""

    VALUE = "fail:value"
    PRECISION = "fail:precision"
    """Within the worst case of the class, but far coarser than the dtype that the target claims to compute in."""
    SPECIAL = "fail:special"
    STRUCTURE = "fail:shape-dtype"
    ARTIFACT = "fail:invalid-artifact"
    NONDETERMINISTIC = "fail:nondeterministic"
    CONTRACT = "fail:contract"
    """A declaration, a pass or a target breaks a rule: an invariant, a mutated input, an attribute never read."""
    SAMPLE = "fail:sample"
    """The samples of an operator raise, draw another call from the same seed, or draw a call that eager rejects."""
    UNDECLARED = "unsupported:undeclared"
    """The target fails on a node that it did not reject."""
    XPASS = "xpass"
    """A check that was expected to fail, or to deviate, now passes."""
    CRASH = "crash"
    HANG = "hang"
    MEMORY = "memory"
    """The worker reached its memory limit."""

    @property
    def is_failure(self) -> bool:
        """Whether this verdict fails a run."""
        return self not in _HARMLESS_VERDICTS


_HARMLESS_VERDICTS = frozenset(
    {Verdict.PASS, Verdict.DEVIATION, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.UNSTABLE, Verdict.NOT_RUN}
)


class Reason(StrEnum):
    """Category of the reason why a check was not run. Reports count by it, since messages quote individual calls."""

    NO_KERNEL = "eager has no kernel"
    UNLISTED_DTYPE = "eager rejects a dtype that the samples do not list"
    UNJUDGED_DTYPE = "the suite does not judge one of its dtypes"
    REJECTED_CALL = "eager rejects the drawn call"
    FEW_CALLS = "there are fewer different calls than planned"
    AMBIGUOUS = "rounding decides too many elements"
    SAMPLES = "the samples are wrong, as another check reports"
    NO_SUITABLE_CALL = "no drawn call suits the check"
    NOT_SENSITIVE = "no call depends on the attribute"
    NO_SIZES = "no size may vary"
    NO_NODES = "the target rejects every call of the graph"
    RUN_SEPARATELY = "the cases run one by one"
    FAILS_ELSEWHERE = "the target fails in other levels, too"
    ENOUGH_FAILURES = "the task failed often enough"
    ABANDONED = "the task was abandoned"
    NO_LONGER_PLANNED = "the check is no longer planned"


PROVING_VERDICTS = frozenset({Verdict.PASS, Verdict.DEVIATION})
"""Verdicts that prove something about the target."""

COUNT_FIELDS = ("elements", "ambiguous", "unstable", "unstable_finite")
"""Element counts of a comparison, in the order of its fields."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of judging one run of one case: the verdict, and the worst element of all outputs.

    ``error`` and ``bound`` are those of the element with the largest ``error / bound`` (the ``ratio``), in the unit of
    the output. ``quality`` is ``RMS(T - R) / RMS(E - R)``: how much coarser than eager the target is on average.
    """

    verdict: Verdict
    message: str = ""
    error: float = 0.0
    bound: float = 0.0
    ratio: float = 0.0
    quality: float = 0.0
    elements: int = 0
    ambiguous: int = 0
    """Elements with a class that rounding decides, such as ``floor(x / x)``: either result is correct."""
    unstable: int = 0
    """Elements where eager itself exceeds the bound; they are compared with eager only."""
    unstable_finite: int = 0
    """Unstable elements where eager and exact arithmetic give numbers, so that no overflow or NaN explains them."""
    reason: str = ""
    """`Reason` why the check was not run; empty for all other verdicts."""

    @property
    def grade(self) -> str:
        """A, B, C or D: at most 3, 10 or 20 times as coarse as eager, or beyond."""
        return next((g for g, limit in (("A", 3), ("B", 10), ("C", 20)) if self.quality <= limit), "D")


def sum_counts(found: Sequence[Comparison]) -> dict[str, int]:
    """Return the totals of the element counts of comparisons, by field."""
    return {count: sum(getattr(c, count) for c in found) for count in COUNT_FIELDS}


def make_not_run(reason: Reason, message: str) -> Comparison:
    """Return the comparison of a check that was not run."""
    return Comparison(Verdict.NOT_RUN, message, reason=reason)
