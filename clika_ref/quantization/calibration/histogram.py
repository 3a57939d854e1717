"""Histograms that depend neither on the order of the data nor on its split across processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BINS_PER_SIGN = 2048
"""Bins for each sign: eight for each step of INT8, so that a bin represents its elements well."""

MIN_EXPONENT = -149
"""Exponent of the smallest float32 above 0, and of the bins before a larger element was seen."""


def _zero_counts() -> Tensor:
    return torch.zeros(2 * BINS_PER_SIGN, dtype=torch.int64, device="cpu")


@dataclass
class Histogram:
    """Counts of elements in bins of power-of-two width: ``[i * width, (i + 1) * width)`` is ``BINS_PER_SIGN + i``.

    Bins start at 0, and widen by merging in pairs. Histograms of the same elements are therefore equal in any order of
    additions, and whether counted together or merged from parts.
    """

    exponent: int = MIN_EXPONENT
    counts: Tensor = field(default_factory=_zero_counts)
    total: int = 0
    """Number of counted elements."""

    @property
    def width(self) -> float:
        """Width of a bin."""
        return 2.0**self.exponent

    @property
    def centers(self) -> Tensor:
        """Center of each bin, ``float64[2 * BINS_PER_SIGN]``."""
        return (torch.arange(-BINS_PER_SIGN, BINS_PER_SIGN, dtype=torch.float64, device="cpu") + 0.5) * self.width

    def add(self, elements: Tensor) -> None:
        """Count finite elements, ``float[n]``, on any device."""
        if not len(elements):
            return
        elements = elements.cpu()
        low, high = torch.aminmax(elements)
        self._widen(_exponent_for(max(-float(low), float(high))))
        bins = torch.floor(elements.double() * 2.0**-self.exponent).long() + BINS_PER_SIGN
        self.counts += torch.bincount(bins, minlength=2 * BINS_PER_SIGN)
        self.total += len(elements)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self._widen(other.exponent)
        self.counts += _merge_bins(other.counts, self.exponent - other.exponent)
        self.total += other.total

    def quantile(self, share: float) -> float:
        """Return the upper bound of the first bin with a cumulative count of at least ``share``."""
        reached = torch.cumsum(self.counts, 0) >= share * self.total
        return (int(reached.int().argmax()) - BINS_PER_SIGN + 1) * self.width

    def _widen(self, exponent: int) -> None:
        if exponent > self.exponent:
            self.counts = _merge_bins(self.counts, exponent - self.exponent) if self.total else self.counts
            self.exponent = exponent


def _exponent_for(reach: float) -> int:
    """Return the smallest exponent with bins for all elements up to ``reach``; the outer bounds belong to no bin."""
    return max(math.frexp(reach)[1] - int(math.log2(BINS_PER_SIGN)), MIN_EXPONENT) if reach else MIN_EXPONENT


def _merge_bins(counts: Tensor, times: int) -> Tensor:
    """Merge bins in pairs, this many times."""
    if not times:
        return counts
    bins = (torch.arange(-BINS_PER_SIGN, BINS_PER_SIGN, device="cpu") >> min(times, 62)) + BINS_PER_SIGN
    return torch.zeros_like(counts).index_add_(0, bins, counts)
