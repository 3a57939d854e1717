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
    """Not tried; the message says why, and its `Reason` which kind of reason it is."""

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


_HARMLESS = frozenset(
    {Verdict.PASS, Verdict.DEVIATION, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.UNSTABLE, Verdict.NOT_RUN}
)


class Reason(StrEnum):
    """The kind of reason for which a check was not run: reports count by it, as messages quote calls."""

    NO_KERNEL = "eager has no kernel for it"
    UNNAMED_DTYPE = "eager refuses a dtype that the samples do not name"
    UNJUDGED_DTYPE = "it needs a dtype that is not judged"
    REFUSED_CALL = "eager refuses the call that was drawn"
    FEW_CALLS = "there are fewer different calls than are planned"
    AMBIGUOUS = "rounding decides too many of its elements"
    SAMPLES = "the samples are at fault, as another check reports"
    NOTHING_TO_LOOK_AT = "no call shows what the check is of"
    NOT_SENSITIVE = "no call depends on the attribute"
    NO_SIZES = "it has no sizes that may vary"
    NO_NODES = "the target refuses all of it"
    NOT_TOGETHER = "its cases are run one by one"
    FAILS_HERE = "the target fails on it in other levels too"
    ENOUGH_FAILURES = "its task had failed often enough"
    GIVEN_UP = "its task was given up"
    GONE = "it is no longer planned"


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
    reason: str = ""
    """The `Reason` of what was not run; empty for all else."""

    @property
    def grade(self) -> str:
        """A, B, C or D: at most 3, 10 or 20 times as coarse as eager, or beyond."""
        return next((g for g, limit in (("A", 3), ("B", 10), ("C", 20)) if self.quality <= limit), "D")


def not_run(reason: Reason, message: str) -> Comparison:
    """Return what stands for a check that was not run."""
    return Comparison(Verdict.NOT_RUN, message, reason=reason)
