"""Expected outputs as plain arrays that need no judge: an interval for each element, and the allowed special values."""

from __future__ import annotations

import math

import numpy as np
import torch

from clika_ref_conformance.judging.expected_output import EAGER_ULPS, ExpectedOutput
from clika_ref_conformance.judging.rounding import ulp_of
from clika_ref_conformance.judging.statistics import MAX_QUALITY, measure_quality

SPECIAL_VALUES = (math.nan, math.inf, -math.inf)
"""Special values of bits 0, 1 and 2 of ``special``: the element may have this value."""

PROBE_ULPS = 64
"""Distance of a probe from eager, to find the divisor of the judge's mean error; far above eager's own rounding."""


def make_expectation(expected: ExpectedOutput, *, coarse: bool = False) -> dict[str, np.ndarray]:
    """Return arrays that suffice to check an output.

    Args:
        expected: the judge's expected values of the output.
        coarse: whether the finding was that the errors are too large on average, with none beyond its bound.

    Returns:
        ``low`` and ``high``, in float64 or int64, of the shape of the output; ``special``, one bit for each of
        `SPECIAL_VALUES`, for floats; and ``mean``, the largest root mean square of ``T - exact``, with ``exact``, if
        ``coarse`` is set.
    """
    if not expected.eager.is_floating_point():
        return _expect_integers(expected)
    low, high = _compute_correct_interval(expected)
    special = torch.zeros(expected.eager.shape, dtype=torch.uint8)
    for bit, value in enumerate(SPECIAL_VALUES):
        right = expected.accepts(torch.full_like(expected.eager, value)) | expected.random
        special |= right.to(torch.uint8) << bit
    arrays = {"low": low.numpy(), "high": high.numpy(), "special": special.numpy()}
    if coarse and expected.dot_statistics is not None:
        arrays |= {"exact": expected.exact.double().numpy(), "mean": np.array(_compute_max_mean_error(expected))}
    return arrays


def _expect_integers(expected: ExpectedOutput) -> dict[str, np.ndarray]:
    eager = expected.eager
    if expected.random:
        limits = torch.iinfo(torch.int64)
        low, high = (torch.full(eager.shape, n, dtype=torch.int64) for n in (limits.min, limits.max))
    else:
        candidates = torch.stack(
            [t.long() for t in ((eager,) if expected.same else (eager, expected.exact, *expected.runs))]
        )
        low, high = candidates.amin(0), candidates.amax(0)
    return {"low": low.numpy(), "high": high.numpy()}


def _compute_correct_interval(expected: ExpectedOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest correct finite number; NaN if there is none."""
    eager = expected.eager.double()
    if expected.same and not expected.random:
        return eager, eager
    exact, bound = expected.exact.double(), expected.element_bounds()
    low, high = exact - bound, exact + bound
    slack = bound.nan_to_num(0.0, 0.0) + EAGER_ULPS * ulp_of(eager, expected.eager.dtype)
    low = torch.where(expected.unstable, torch.fmin(low, eager - slack), low)
    high = torch.where(expected.unstable, torch.fmax(high, eager + slack), high)
    free = bound.isinf() | (expected.ambiguous & ~exact.isfinite()) | expected.random
    return torch.where(free, -math.inf, low), torch.where(free, math.inf, high)


def _compute_max_mean_error(expected: ExpectedOutput) -> float:
    """Return the root mean square error above which the judge rejects an output as too coarse."""
    eager = expected.eager
    probe = eager.double() + PROBE_ULPS * ulp_of(eager.double(), eager.dtype)
    finite = probe.isfinite() & expected.exact.isfinite() & ~expected.unstable & ~expected.ambiguous
    grade = measure_quality(expected, probe)
    if not grade or not bool(finite.any()):
        return math.inf
    mean = float((probe - expected.exact.double())[finite].square().mean().sqrt())
    return MAX_QUALITY * mean / grade
