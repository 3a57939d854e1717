"""Faults at range limits: crossing bounds, ranges of one number, and cancellation in tails."""

from __future__ import annotations

from clika_ref_aten.error_function import error_function

from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("edges")


@FAULTS.lowering("histc", "a range of one number other than 0 is widened around it, whatever the elements are")
def _(original, op, x, *, bins, min, max):
    aside = 1 if min == max != 0 else 0
    return original(op, x, bins=bins, min=min - aside, max=max + aside)


@FAULTS.lowering("logit", "bounds that cross are those of Clip, where the upper one wins")
def _(original, op, x, *, eps):
    if eps is None or eps <= 0.5:
        return original(op, x, eps=eps)
    (x,) = op.promote(x)
    return original(op, op.Clip(x, op.like(x, eps), op.like(x, 1 - eps)), eps=None)


@FAULTS.lowering("erfc", "it is 1 - erf, which keeps no digits of what is small")
def _(original, op, x):
    found = error_function(op, *op.promote(x))
    return op.Sub(op.like(found, 1), found)


@FAULTS.lowering("erfc", "below 0 it is that of the size")
def _(original, op, x):
    return original(op, op.Abs(x))
