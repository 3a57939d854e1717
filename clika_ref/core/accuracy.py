"""How far the result of an operator or a pass may lie from exact arithmetic: the error classes of the judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """The class of a rounding error; ``ulps`` and ``companion`` serve the class ``ulp`` only.

    A bound in ulp is ``ulps * ulp(max(|y|, companion))``: the companion keeps tails honest in which the result is tiny
    but the inputs of the last subtraction are not. It is a number, or ``"x"`` for the first operand.
    """

    kind: str
    """Which class it is, in a word."""
    ulps: float = 0.0
    companion: float | str | None = None

    def __str__(self) -> str:
        return f"ulp({self.ulps:g}, {self.companion})" if self.kind == "ulp" else self.kind


EXACT = ErrorClass("exact")
"""Equal in every element, NaN included; only the sign of a zero may differ: copies, selections, integers."""

DOT = ErrorClass("dot")
"""A sum of products: bounded by ``K * u * sum |x| |w|``."""

NORM = ErrorClass("norm")
"""Mean, variance, and a division by the deviation."""

SOFTMAX = ErrorClass("softmax")
"""Exponentials of ``x - max x`` and their sum."""

INTERPOLATION = ErrorClass("interpolation")
"""A weighted sum of neighbours whose coordinates are rounded too."""

COMPOSE = ErrorClass("compose")
"""Several of the above: bounded by jitter in float64."""


def ulp(ulps: float = 8.0, companion: float | str | None = None) -> ErrorClass:
    """Error class of an elementwise function (8: the worst of 43 of 44 operator and runtime pairs is 5.2).

    Args:
        ulps: how many units in the last place a result may be off.
        companion: the least magnitude whose unit counts: a number, or ``"x"`` for the first operand.
    """
    return ErrorClass("ulp", ulps, companion)
