"""What can become of one item of the plan, and what the judge found out on the way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What became of one item of the plan. Every item gets exactly one, so that the counts add up to the plan."""

    PASS = "pass"  # noqa: S105 - a verdict, no secret
    DEVIATION = "deviation:declared"
    """The target differs in a way that it declares, and in exactly that way."""
    UNSUPPORTED = "unsupported:declared"
    """The target refuses the node, and says why, before anything is compiled."""
    XFAIL = "xfail"
    UNSTABLE = "reference_unstable"
    """Eager itself leaves the bound: there is nothing to hold the target against."""
    NOT_RUN = "not-run"
    """Not tried; the message says why."""

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
    """The samples of an operator raise, draw another call from the same seed, or one that eager refuses."""
    UNDECLARED = "unsupported:undeclared"
    """The target fails on what it did not refuse."""
    XPASS = "xpass"
    """Expected to fail or declared to deviate, and does not any more."""
    CRASH = "crash"
    HANG = "hang"
    MEMORY = "memory"
    """The worker reached its memory limit."""

    @property
    def is_failure(self) -> bool:
        """Whether a run that holds this verdict has failed."""
        return self not in _HARMLESS

    @property
    def is_silent(self) -> bool:
        """Whether this verdict says nothing about the numbers: the check was refused or not run."""
        return self in (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


_HARMLESS = frozenset(
    {Verdict.PASS, Verdict.DEVIATION, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.UNSTABLE, Verdict.NOT_RUN}
)


PROVING = frozenset({Verdict.PASS, Verdict.DEVIATION})
"""Verdicts that prove something of the target."""

COUNTS = ("elements", "ambiguous", "unstable", "strayed")
"""What a comparison counts, in the order of its fields."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The judge's answer to one run of one case: the verdict, and the worst element of all outputs.

    ``error`` and ``bound`` are those of the element whose ``error / bound`` (the ``ratio``) is largest, in the unit of
    the output. ``quality`` is ``RMS(T - R) / RMS(E - R)``: how much coarser than eager the target is in the mean.
    """

    verdict: Verdict
    message: str = ""
    error: float = 0.0
    bound: float = 0.0
    ratio: float = 0.0
    quality: float = 0.0
    elements: int = 0
    ambiguous: int = 0
    """Elements of which rounding decides the class, such as ``floor(x / x)``: either is right."""
    unstable: int = 0
    """Elements at which eager itself leaves the bound: judged against eager alone."""
    strayed: int = 0
    """Those among them of which eager and exact arithmetic make numbers, so that no overflow or NaN excuses them."""

    @property
    def grade(self) -> str:
        """A, B, C or D: at most 3, 10 or 20 times as coarse as eager, or beyond."""
        return next((g for g, limit in (("A", 3), ("B", 10), ("C", 20)) if self.quality <= limit), "D")
