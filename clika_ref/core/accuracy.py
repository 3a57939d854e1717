"""Error classes: the tolerance between the result of an operator or a pass and exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """The class of a rounding error; only the class ``ulp`` uses ``ulps`` and ``companion``.

    A bound in ulp is ``ulps * ulp(max(|y|, companion))``. The companion covers tails with a tiny result of a
    subtraction between larger numbers. It is a number, or ``"x"`` for the first operand.
    """

    kind: str
    """The name of the class."""
    ulps: float = 0.0
    companion: float | str | None = None

    def __str__(self) -> str:
        return f"ulp({self.ulps:g}, {self.companion})" if self.kind == "ulp" else self.kind


EXACT = ErrorClass("exact")
"""Equal in every element, including NaN; only the sign of a zero may differ. For copies, selections and integers."""

DOT = ErrorClass("dot")
"""A sum of products: bounded by ``K * u * sum |x| |w|``."""

NORM = ErrorClass("norm")
"""Mean, variance, and a division by the standard deviation."""

SOFTMAX = ErrorClass("softmax")
"""Exponentials of ``x - max x`` and their sum."""

INTERPOLATION = ErrorClass("interpolation")
"""A weighted sum of neighbours at rounded coordinates."""

COMPOSE = ErrorClass("compose")
"""Several of the above: bounded by jitter in float64."""


def ulp(ulps: float = 8.0, companion: float | str | None = None) -> ErrorClass:
    """Return the error class of an elementwise function (8: the worst of 43 of 44 operator and runtime pairs is 5.2).

    Args:
        ulps: the maximum error in units in the last place.
        companion: the smallest magnitude for computing the ulp: a number, or ``"x"`` for the first operand.
    """
    return ErrorClass("ulp", ulps, companion)
