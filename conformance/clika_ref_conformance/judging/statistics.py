"""Judge an output as a whole: statistics of a sum of products, and its coarseness relative to eager."""

from __future__ import annotations

import math

import torch

from clika_ref_conformance.judging.expected_output import ExpectedOutput
from clika_ref_conformance.judging.rounding import rounding_unit_of, smallest_step_of, ulp_of

VARIANCE_LIMIT = 1.6
"""``sum z^2 <= 1.6 sum K`` for ``z = error / (u sum |x| |w|)``. Source: TOSA reference model, dot product test."""
MAX_QUALITY = 20.0
"""Limit on the quality: correct runtimes in float32 reach 19.9; the mildest violation, TF32 inputs, starts at 82."""
BOUND_TO_ROUNDING_RATIO = 30
"""Elementwise bound over RMS rounding error: bounds are 8 ulp of the companion, and rounding is off by 0.29 ulp."""
MIN_TERMS = 16
"""Minimum number of terms of a sum for its quality to be significant."""
MIN_ELEMENTS = 8
"""Minimum number of elements; with fewer, one lucky rounding of eager decides the quality."""


def measure_quality(expected: ExpectedOutput, actual: torch.Tensor) -> float:
    """Return ``RMS(T - R) / RMS(E - R)`` over the finite elements.

    The divisor has a minimum: the error of evenly distributed rounding (0.29 ulp), and for sums of products
    ``u sum |x| |w| / sqrt(K)``. So a target does not look bad because eager is exact by luck.
    """
    if expected.bound is None or not actual.numel():
        return 0.0
    exact, eager, dtype = expected.exact, expected.eager.double(), expected.eager.dtype
    finite = exact.isfinite() & eager.isfinite() & actual.isfinite() & ~expected.unstable & ~expected.ambiguous
    if not bool(finite.any()):
        return 0.0
    floor = max(_rms(ulp_of(exact, dtype)[finite]) / math.sqrt(12), torch.finfo(torch.float64).smallest_normal)
    if expected.dot_statistics is None:
        floor = max(floor, _rms(expected.element_bounds()[finite].nan_to_num(0.0, 0.0, 0.0)) / BOUND_TO_ROUNDING_RATIO)
    else:
        walk = rounding_unit_of(dtype) * expected.dot_statistics.weight / expected.dot_statistics.terms.sqrt()
        floor = max(floor, _rms(walk[finite]))
    return _rms((actual.double() - exact)[finite]) / max(_rms((eager - exact)[finite]), floor)


def describe_coarseness(expected: ExpectedOutput, actual: torch.Tensor, grade: float) -> str:
    """Describe why an output within its bounds is too coarse for its declared dtype; empty if it is not."""
    found, dtype = expected.dot_statistics, expected.eager.dtype
    if found is None or not actual.numel():
        return ""
    unit = rounding_unit_of(found.formats.accumulate) * found.weight + smallest_step_of(found.formats.accumulate)
    z = (actual.double() - expected.exact) / unit
    counted = z.isfinite() & (found.weight > 0) & ~expected.unstable & expected.element_bounds().isfinite()
    if not bool(counted.any()):
        return ""
    total, limit = float(z[counted].square().sum()), VARIANCE_LIMIT * float(found.variance[counted].sum())
    if total > limit:
        return f"the errors of a sum of products have a variance of {total:.3g}, above the limit of {limit:.3g}"
    claimed = dtype is torch.float32 and found.formats.is_as_fine
    long = float(found.terms[counted].mean()) >= MIN_TERMS and int(counted.sum()) >= MIN_ELEMENTS
    if long and claimed and grade > MAX_QUALITY:
        return (
            f"{grade:.3g} times as inaccurate as eager, although the target claims {str(dtype).removeprefix('torch.')}"
        )
    return ""


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
