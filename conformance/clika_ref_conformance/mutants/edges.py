"""Faults at range limits: crossing bounds, ranges of one number, and cancellation in tails."""

from __future__ import annotations

from clika_ref_aten.error_function import error_function

from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("edges")


@FAULTS.lowering("histc", "an empty range around a number other than 0 is widened for all elements")
def _(original, op, x, *, bins, min, max):
    aside = 1 if min == max != 0 else 0
    return original(op, x, bins=bins, min=min - aside, max=max + aside)


@FAULTS.lowering("logit", "crossing bounds are those of Clip, which returns the upper one")
def _(original, op, x, *, eps):
    if eps is None or eps <= 0.5:
        return original(op, x, eps=eps)
    (x,) = op.promote(x)
    return original(op, op.Clip(x, op.like(x, eps), op.like(x, 1 - eps)), eps=None)


@FAULTS.lowering("erfc", "it is 1 - erf, which cancels for small results")
def _(original, op, x):
    found = error_function(op, *op.promote(x))
    return op.Sub(op.like(found, 1), found)


@FAULTS.lowering("erfc", "for negative elements, it is that of the absolute value")
def _(original, op, x):
    return original(op, op.Abs(x))
