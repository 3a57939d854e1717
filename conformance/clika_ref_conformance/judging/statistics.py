"""Judgement of an output as a whole: statistics of a sum of products, and how much coarser than eager it is."""

from __future__ import annotations

import math

import torch

from clika_ref_conformance.judging.rounding import step_of, ulp_of, unit_of
from clika_ref_conformance.judging.special_values import Expected

VARIANCE = 1.6
"""``sum z^2 <= 1.6 sum K`` for ``z = error / (u sum |x| |w|)``. Source: TOSA reference model, dot product test."""
LARGEST_QUALITY = 20.0
"""Correct runtimes in float32 reach 19.9; the mildest cheat, TF32 inputs, starts at 82."""
WIDEST = 30
"""Bounds of elementwise functions are 8 ulp of their companion, and even rounding is off by 0.29 ulp."""
FEWEST_TERMS = 16
"""Below so many terms a sum is too short for its quality to tell."""
FEWEST_ELEMENTS = 8
"""Below so many elements one lucky rounding of eager decides on its quality."""


def quality(expected: Expected, actual: torch.Tensor) -> float:
    """Return ``RMS(T - R) / RMS(E - R)`` over the finite elements.

    The divisor has a floor, the error of evenly distributed rounding (0.29 ulp), and for sums of products
    ``u sum |x| |w| / sqrt(K)``, so that eager being exact by luck makes no target look bad.
    """
    if expected.bound is None or not actual.numel():
        return 0.0
    exact, eager, dtype = expected.exact, expected.eager.double(), expected.eager.dtype
    finite = exact.isfinite() & eager.isfinite() & actual.isfinite() & ~expected.unstable & ~expected.ambiguous
    if not bool(finite.any()):
        return 0.0
    floor = max(_rms(ulp_of(exact, dtype)[finite]) / math.sqrt(12), torch.finfo(torch.float64).smallest_normal)
    if expected.products is None:
        floor = max(floor, _rms(expected.allowed()[finite].nan_to_num(0.0, 0.0, 0.0)) / WIDEST)
    else:
        walk = unit_of(dtype) * expected.products.weight / expected.products.terms.sqrt()
        floor = max(floor, _rms(walk[finite]))
    return _rms((actual.double() - exact)[finite]) / max(_rms((eager - exact)[finite]), floor)


def coarseness(expected: Expected, actual: torch.Tensor, grade: float) -> str:
    """Say why an output within its bounds is too coarse for the dtype it is declared in, or return nothing."""
    found, dtype = expected.products, expected.eager.dtype
    if found is None or not actual.numel():
        return ""
    unit = unit_of(found.formats.accumulate) * found.weight + step_of(found.formats.accumulate)
    z = (actual.double() - expected.exact) / unit
    counted = z.isfinite() & (found.weight > 0) & ~expected.unstable & expected.allowed().isfinite()
    if not bool(counted.any()):
        return ""
    total, limit = float(z[counted].square().sum()), VARIANCE * float(found.variance[counted].sum())
    if total > limit:
        return f"the errors of a sum of products have a variance of {total:.3g} where {limit:.3g} is the limit"
    claimed = dtype is torch.float32 and found.formats.are_as_fine
    long = float(found.terms[counted].mean()) >= FEWEST_TERMS and int(counted.sum()) >= FEWEST_ELEMENTS
    if long and claimed and grade > LARGEST_QUALITY:
        return f"{grade:.3g} times as coarse as eager, though declared in {str(dtype).removeprefix('torch.')}"
    return ""


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
