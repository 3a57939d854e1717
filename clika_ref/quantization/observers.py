"""Observers: which part of what a value held its integers are to cover, decided from its statistics alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clika_ref.quantization.statistics import Statistics

CLIPPED = tuple(1 - step / 64 for step in range(48))
"""Shares of the whole range that are tried for the least error, down to a quarter."""


@dataclass(frozen=True, slots=True)
class Range:
    """What integers are to cover; 0 always lies in it, as padding and masks must stay exact."""

    low: float
    high: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", min(self.low, 0.0))
        object.__setattr__(self, "high", max(self.high, 0.0))

    @property
    def is_point(self) -> bool:
        """Whether nothing but 0 lies in it, so that no scale makes a difference."""
        return self.low == self.high == 0.0


Observer = Callable[[Statistics], Range]
"""Chooses a range; the statistics are not empty."""


def extremes(statistics: Statistics) -> Range:
    """Return all that was seen."""
    return Range(statistics.low, statistics.high)


def mean_extremes(statistics: Statistics) -> Range:
    """Return the mean of the ends of the batches, which a single batch hardly moves."""
    return Range(*statistics.mean_extremes)


def percentile(statistics: Statistics, *, share: float) -> Range:
    """Return what a share of the elements lies in, as much being left out below as above."""
    outside = (1 - share) / 2
    low, high = (statistics.histogram.quantile(q) for q in (outside, 1 - outside))
    return Range(max(low - statistics.histogram.width, statistics.low), min(high, statistics.high))


def least_error(statistics: Statistics, *, levels: int = 256) -> Range:
    """Return the range whose integers are nearest to the elements, in the mean of squares.

    Either end is drawn in for itself, from the extremes towards 0, while the other stays; a value on one side of 0 has
    one end only.

    Args:
        statistics: of the value.
        levels: how many integers there are.
    """
    shares = torch.tensor(CLIPPED, dtype=torch.float64)
    low, high = min(statistics.low, 0.0), max(statistics.high, 0.0)
    found = Range(low, high)
    for _ in range(2):  # the best of one end depends on the other, a little
        highs = high * shares
        found = Range(found.low, _best(highs, quantization_errors(statistics, torch.tensor(found.low), highs, levels)))
        lows = low * shares
        found = Range(_best(lows, quantization_errors(statistics, lows, torch.tensor(found.high), levels)), found.high)
    return found


def _best(ends: Tensor, errors: Tensor) -> float:
    return float(ends[errors.argmin()])


def quantization_error(statistics: Statistics, chosen: Range, levels: int = 256) -> float:
    """Return the mean square of what integers in a range miss of the elements, as far as the histogram tells."""
    low, high = torch.tensor([chosen.low, chosen.high], dtype=torch.float64)
    return float(quantization_errors(statistics, low, high, levels))


def quantization_errors(statistics: Statistics, low: Tensor, high: Tensor, levels: int = 256) -> Tensor:
    """Return `quantization_error` of many ranges at once, ``float64`` of the shape of their ends, which broadcast."""
    counts = statistics.histogram.counts
    seen = counts.nonzero().squeeze(1)
    x, counts = statistics.histogram.centers[seen], counts[seen].double()
    low, high = (end.double().unsqueeze(-1) for end in torch.broadcast_tensors(low, high))
    scale = ((high - low) / (levels - 1)).clamp(min=TINIEST)
    offset = torch.floor(-low / scale + 0.5)
    missed = (x / scale).round_().add_(offset).clamp_(0, levels - 1).sub_(offset).mul_(scale).sub_(x)
    return missed.square_().mul_(counts).sum(-1) / counts.sum().clamp(min=1)


TINIEST = 2.0**-1000
"""The step of a range of one point, at which whatever is not 0 is missed whole."""


OBSERVERS: Mapping[str, Observer] = {
    "min-max": extremes,
    "mean of extremes": mean_extremes,
    "99.99 %": partial(percentile, share=0.9999),
    "99.999 %": partial(percentile, share=0.99999),
    "least error": least_error,
}
"""All that are tried, by the name that reports show."""
