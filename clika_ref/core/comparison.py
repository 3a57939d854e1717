"""Comparison of two results of one model up to rounding, with a description of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_ROUNDINGS = 1024
"""Allowed difference in roundings of the largest element, for the same kernels in the same order.

Functional forms of in-place calls and explicit autocast casts reorder a few; a real difference is orders of magnitude
larger. The mildest loss of precision (TF32 inputs) already moves a result by 8192 float32 roundings.
"""


def describe_difference(expected: Any, actual: Any, roundings: float = MAX_ROUNDINGS) -> str | None:
    """Describe the difference of ``actual`` from ``expected`` beyond rounding; None if there is none.

    Numbers and constants must be equal. Tensors must agree in dtype, shape and special values, integers in every
    element, floats and the parts of complex numbers within ``roundings * eps(dtype) * max |expected|``.
    """
    if not isinstance(expected, torch.Tensor):
        return None if expected is actual or expected == actual else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"{actual!r} instead of a tensor"
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.is_complex():
        expected, actual = (torch.view_as_real(t.resolve_conj()) for t in (expected, actual))
    if torch.equal(expected, actual):  # in a tenth of the time, and without copies
        return None
    if not expected.dtype.is_floating_point:
        wrong = int((expected != actual).sum())
        return f"{wrong} of {expected.numel()} elements differ"
    return _describe_float_difference(expected.detach(), actual.detach(), roundings)


def _describe_float_difference(expected: torch.Tensor, actual: torch.Tensor, roundings: float) -> str | None:
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not torch.equal(
        torch.nan_to_num(expected[~finite], 2.0, 1.0, -1.0), torch.nan_to_num(actual[~finite], 2.0, 1.0, -1.0)
    ):
        return "NaN or infinity at different positions"
    if not finite.any():
        return None
    e, a = expected[finite].double(), actual[finite].double()
    worst, scale = float((e - a).abs().max()), float(e.abs().max())
    unit = torch.finfo(expected.dtype).eps * scale
    if worst <= roundings * unit:
        return None
    count = worst / unit if unit else float("inf")
    return f"off by {worst:.3g}, with a largest element of {scale:.3g} ({count:.0f} roundings)"


def describe_differences(
    expected: Sequence[Any], actual: Sequence[Any], roundings: float = MAX_ROUNDINGS
) -> dict[int, str]:
    """Describe the differences between two lists of results, by position; equal results are left out.

    Args:
        expected: the reference results.
        actual: the results to compare with them, as many as in ``expected``.
        roundings: the tolerance, as in `describe_difference`.

    Raises:
        ValueError: the lists differ in length.
    """
    found = {i: describe_difference(e, a, roundings) for i, (e, a) in enumerate(zip(expected, actual, strict=True))}
    return {i: text for i, text in found.items() if text is not None}
