"""Observers: choose the range of a value to quantize from its statistics alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clika_ref.quantization.calibration.statistics import Statistics

CLIPPING_SHARES = tuple(1 - step / 64 for step in range(48))
"""Shares of the whole range that `least_error` tries, down to a quarter."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range to quantize; always contains 0, since padding and masks must stay exact."""

    low: float
    high: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", min(self.low, 0.0))
        object.__setattr__(self, "high", max(self.high, 0.0))

    @property
    def is_point(self) -> bool:
        """Whether it contains only 0, so that the scale makes no difference."""
        return self.low == self.high == 0.0


Observer = Callable[[Statistics], Range]
"""Chooses a range from statistics that are not empty."""


def min_max(statistics: Statistics) -> Range:
    """Return the min/max of all elements seen."""
    return Range(statistics.low, statistics.high)


def mean_min_max(statistics: Statistics) -> Range:
    """Return the min/max averaged over batches, so that a single batch has little influence."""
    return Range(*statistics.mean_min_max)


def percentile(statistics: Statistics, *, share: float) -> Range:
    """Return the range of a central ``share`` of the elements, with equal tails below and above.

    Source: Wu et al., Integer Quantization for Deep Learning Inference (2020).
    """
    outside = (1 - share) / 2
    low, high = (statistics.histogram.quantile(q) for q in (outside, 1 - outside))
    return Range(max(low - statistics.histogram.width, statistics.low), min(high, statistics.high))


def least_error(statistics: Statistics, *, levels: int = 256) -> Range:
    """Return the range with the least mean squared quantization error.

    Each bound is moved from the min/max towards 0 while the other one is fixed. A value with only one sign has one
    bound.

    Source: Nagel et al., A White Paper on Neural Network Quantization (2021), section 3.1.

    Args:
        statistics: of the value.
        levels: number of quantized levels.
    """
    shares = torch.tensor(CLIPPING_SHARES, dtype=torch.float64)
    low, high = min(statistics.low, 0.0), max(statistics.high, 0.0)
    found = Range(low, high)
    for _ in range(2):  # the best of one bound depends slightly on the other
        highs = high * shares
        found = Range(
            found.low, _best_bound(highs, quantization_errors(statistics, torch.tensor(found.low), highs, levels))
        )
        lows = low * shares
        found = Range(
            _best_bound(lows, quantization_errors(statistics, lows, torch.tensor(found.high), levels)), found.high
        )
    return found


def _best_bound(bounds: Tensor, errors: Tensor) -> float:
    return float(bounds[errors.argmin()])


def quantization_error(statistics: Statistics, chosen: Range, levels: int = 256) -> float:
    """Return the mean squared quantization error of a range, estimated from the histogram."""
    low, high = torch.tensor([chosen.low, chosen.high], dtype=torch.float64)
    return float(quantization_errors(statistics, low, high, levels))


def quantization_errors(statistics: Statistics, low: Tensor, high: Tensor, levels: int = 256) -> Tensor:
    """Return the `quantization_error` of many ranges at once, ``float64`` of the broadcast shape of their bounds."""
    counts = statistics.histogram.counts
    seen = counts.nonzero().squeeze(1)
    x, counts = statistics.histogram.centers[seen], counts[seen].double()
    low, high = (end.double().unsqueeze(-1) for end in torch.broadcast_tensors(low, high))
    scale = ((high - low) / (levels - 1)).clamp(min=MIN_STEP)
    offset = torch.floor(-low / scale + 0.5)
    errors = (x / scale).round_().add_(offset).clamp_(0, levels - 1).sub_(offset).mul_(scale).sub_(x)
    return errors.square_().mul_(counts).sum(-1) / counts.sum().clamp(min=1)


MIN_STEP = 2.0**-1000
"""Step of a single-point range; every nonzero element is rounded to that point."""


OBSERVERS: Mapping[str, Observer] = {
    "min-max": min_max,
    "mean-min-max": mean_min_max,
    "percentile-99.99": partial(percentile, share=0.9999),
    "percentile-99.999": partial(percentile, share=0.99999),
    "mse": least_error,
}
"""All observers, by the name in reports."""
