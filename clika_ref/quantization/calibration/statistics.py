"""Statistics of one value over the calibration data, in a fixed amount of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clika_ref.quantization.calibration.histogram import Histogram

MAX_SAMPLED_ELEMENTS = 4096
"""Elements of a value that are counted in each batch: all of a small one, evenly spaced ones of a large one."""

UNBOUNDED_MAGNITUDE = 1e30
"""Elements of this magnitude, or the largest of their dtype, are ignored: masks contain infinities or minima."""


@dataclass
class ExactSum:
    """A sum of floats that does not depend on their order, as `math.fsum`, but incremental."""

    partials: list[float] = field(default_factory=list[float])

    def add(self, x: float) -> None:
        """Add one number.

        Source: Shewchuk, Adaptive Precision Floating-Point Arithmetic (1997), Grow-Expansion.
        """
        values: list[float] = []
        for y in self.partials:
            large, small = (x, y) if abs(x) >= abs(y) else (y, x)
            x = large + small
            rest = small - (x - large)
            if rest:
                values.append(rest)
        self.partials = [*values, x]

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return math.fsum(self.partials)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Statistics of one batch of a value; min, max and sample only cover elements within `UNBOUNDED_MAGNITUDE`."""

    low: float
    high: float
    sample: Tensor
    """``float[n]``; empty if there is no such element."""
    is_unbounded: bool = False


def measure_tensor(x: Tensor) -> BatchStatistics:
    """Measure a tensor, reading each element once.

    Raises:
        ValueError: it contains NaN.
    """
    x = flatten_in_memory_order(x.detach())
    low, high = _min_max(x)
    if math.isnan(low):
        raise ValueError("cannot compute the range of a tensor that contains NaN")
    limit = min(UNBOUNDED_MAGNITUDE, torch.finfo(x.dtype).max)
    is_unbounded = len(x) > 0 and max(-low, high) >= limit
    if is_unbounded:
        x = x[x.abs() < limit]
        low, high = _min_max(x)
    return BatchStatistics(low, high, sample_evenly(x), is_unbounded)


@dataclass
class Statistics:
    """Statistics of one value over all batches so far.

    ``low`` and ``high`` are exact. They, the averaged min/max and the histogram only cover elements within
    `UNBOUNDED_MAGNITUDE`.
    """

    low: float = math.inf
    high: float = -math.inf
    batches: int = 0
    lows: ExactSum = field(default_factory=ExactSum)
    highs: ExactSum = field(default_factory=ExactSum)
    histogram: Histogram = field(default_factory=Histogram)
    is_unbounded: bool = False
    """Whether an element was infinite, or too large for anything but a mask: such a value has no scale."""

    @property
    def is_empty(self) -> bool:
        """Whether no bounded element was seen."""
        return not self.batches

    @property
    def mean_min_max(self) -> tuple[float, float]:
        """Min and max, each averaged over batches."""
        return self.lows.value / self.batches, self.highs.value / self.batches

    def add(self, batch: BatchStatistics) -> None:
        """Add the statistics of a batch."""
        self.is_unbounded |= batch.is_unbounded
        if not len(batch.sample):
            return
        self.low, self.high = min(self.low, batch.low), max(self.high, batch.high)
        self.batches += 1
        self.lows.add(batch.low)
        self.highs.add(batch.high)
        self.histogram.add(batch.sample)

    def merge(self, other: Statistics) -> None:
        """Add statistics of the same value from other data."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.batches += other.batches
        for own, others in ((self.lows, other.lows), (self.highs, other.highs)):
            for partial in others.partials:
                own.add(partial)
        self.histogram.merge(other.histogram)
        self.is_unbounded |= other.is_unbounded


def _min_max(x: Tensor) -> tuple[float, float]:
    if not len(x):
        return math.inf, -math.inf
    low, high = torch.aminmax(x)
    return float(low), float(high)


def sample_evenly(x: Tensor) -> Tensor:
    """Return copies of at most `MAX_SAMPLED_ELEMENTS` elements of ``x[n]``, evenly spaced.

    The step has no factor in common with ``n``, and hence none with any dim. Otherwise some columns, or all channels
    but one, would be skipped.
    """
    step = -(-len(x) // MAX_SAMPLED_ELEMENTS) or 1
    while math.gcd(step, len(x)) > 1:
        step += 1
    sampled = x[::step]
    return (torch.view_as_real(sampled).flatten() if x.is_complex() else sampled).to(torch.float32, copy=True)


def flatten_in_memory_order(x: Tensor) -> Tensor:
    """Return the elements in memory order, ``x[n]``: a view if they fill a block of memory.

    Reading each element in any other order takes several times as long.
    """
    return (x if _is_dense(x) else x.contiguous()).as_strided((x.numel(),), (1,))


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill a block of memory, in any order."""
    dims = sorted(zip(x.stride(), x.shape, strict=True))
    expected = 1
    for stride, size in dims:
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
