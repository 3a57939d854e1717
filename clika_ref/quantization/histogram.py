"""Counts of elements in bins that depend neither on the order of the data nor on how it is split."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BINS = 2048
"""On either side of 0: eight for each step of eight bits, so that a bin is as good as its elements."""

LEAST = -149
"""The exponent of the smallest float32 above 0, and of the bins before anything larger was seen."""


def _no_counts() -> Tensor:
    return torch.zeros(2 * BINS, dtype=torch.int64, device="cpu")


@dataclass
class Histogram:
    """Elements counted in bins as wide as a power of two: ``counts[BINS + i]`` of ``[i * width, (i + 1) * width)``.

    Bins begin at 0, and become wider by joining in pairs. So two histograms of the same elements are equal, in whatever
    order they were added, and whether together or in parts that were merged.
    """

    exponent: int = LEAST
    counts: Tensor = field(default_factory=_no_counts)
    total: int = 0
    """How many elements were counted."""

    @property
    def width(self) -> float:
        """The width of a bin."""
        return 2.0**self.exponent

    @property
    def centers(self) -> Tensor:
        """The middle of each bin, ``float64[2 * BINS]``."""
        return (torch.arange(-BINS, BINS, dtype=torch.float64, device="cpu") + 0.5) * self.width

    def add(self, elements: Tensor) -> None:
        """Count finite elements, ``float[n]``, on whatever device."""
        if not len(elements):
            return
        elements = elements.cpu()
        low, high = torch.aminmax(elements)
        self._widen(_exponent_for(max(-float(low), float(high))))
        bins = torch.floor(elements.double() * 2.0**-self.exponent).long() + BINS
        self.counts += torch.bincount(bins, minlength=2 * BINS)
        self.total += len(elements)

    def merge(self, other: Histogram) -> None:
        """Add what another histogram has counted."""
        self._widen(other.exponent)
        self.counts += _joined(other.counts, self.exponent - other.exponent)
        self.total += other.total

    def quantile(self, share: float) -> float:
        """Return the upper end of the first bin up to which at least a share of the elements lies."""
        reached = torch.cumsum(self.counts, 0) >= share * self.total
        return (int(reached.int().argmax()) - BINS + 1) * self.width

    def _widen(self, exponent: int) -> None:
        if exponent > self.exponent:
            self.counts = _joined(self.counts, exponent - self.exponent) if self.total else self.counts
            self.exponent = exponent


def _exponent_for(reach: float) -> int:
    """Return the smallest exponent at which every element up to ``reach`` lies in a bin; the ends belong to no bin."""
    return max(math.frexp(reach)[1] - int(math.log2(BINS)), LEAST) if reach else LEAST


def _joined(counts: Tensor, times: int) -> Tensor:
    """Join bins in pairs, some times over."""
    if not times:
        return counts
    places = (torch.arange(-BINS, BINS, device="cpu") >> min(times, 62)) + BINS
    return torch.zeros_like(counts).index_add_(0, places, counts)
