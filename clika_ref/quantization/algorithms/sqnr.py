"""Squared norms of outputs and of their differences, without masked elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MASK_MAGNITUDE = 1e30
"""Elements from this magnitude on come from a mask: infinities, or the minimum of a dtype."""


def sum_squares(x: Tensor) -> float:
    """Return the squared norm: the signal of an output, or the noise of a difference."""
    return float(zero_masked_elements(x.detach().double()).square().sum())


def sum_squared_error(found: Tensor, expected: Tensor) -> float:
    """Return ``||found - expected||^2``; elements that are masked, or NaN, in both count as 0."""
    return float(_differences(found, expected).square().sum())


def sum_squared_error_by_sample(found: Tensor, expected: Tensor, samples: int) -> list[float]:
    """Return ``||found - expected||^2`` of each of ``samples`` equal parts along the first dim."""
    return _differences(found, expected).square().reshape(samples, -1).sum(1).tolist()


def relative_squared_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return ``||F - W||^2 / ||W||^2``, averaged over all outputs that are not 0."""
    return mean_ratio((sum_squared_error(f, w), sum_squares(w)) for f, w in zip(found, expected, strict=True))


def mean_ratio(parts: Iterable[tuple[float, float]]) -> float:
    """Return the mean of ``part / whole`` over the pairs with a nonzero whole; 0 if there are none."""
    shares = [part / whole for part, whole in parts if whole]
    return sum(shares) / len(shares) if shares else 0.0


def zero_masked_elements(x: Tensor) -> Tensor:
    """Replace masked elements and NaN by 0."""
    return x.masked_fill(_is_masked(x) | x.isnan(), 0.0)


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    found, expected = found.detach().double(), expected.detach().double()
    same = (found == expected) | (found.isnan() & expected.isnan()) | (_is_masked(found) & _is_masked(expected))
    return (found - expected).masked_fill(same, 0.0)


def _is_masked(x: Tensor) -> Tensor:
    return torch.abs(x) >= MASK_MAGNITUDE
