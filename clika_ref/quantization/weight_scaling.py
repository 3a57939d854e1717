"""AWQ: round weights of large activations more finely, where a preceding node absorbs the division at no cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clika_ref.quantization.factors import Channels
from clika_ref.quantization.smoothing import STRENGTHS, factor_of
from clika_ref.quantization.weights_only import Ways, missed_of, nearest_to_products


class FewBitReading:
    """Evaluates factors for layers with float inputs and low-bit weights, rounded as they will be.

    One half of the input rows fits the rounding, the other half measures the error.

    Source: Lin et al., AWQ: Activation-aware Weight Quantization (2024), section 3.2.
    """

    def __init__(
        self, channels: Channels, x: Tensor, bits: int, blocks: Sequence[int], ways: Ways | None = None
    ) -> None:
        """Prepare an evaluation with the first block size that fits.

        Args:
            channels: of a value that layers with matrices read.
            x: tensor of the value.
            bits: of the weights.
            blocks: block sizes in order of preference, 0 for one scale per row.
            ways: options of the rounding.
        """
        self.weighted, self.bits, self.ways = channels.weighted(), bits, ways or Ways()
        rows = channels.rows(x).float()
        self.mean = rows.abs().mean(0)
        self.fitted, self.judged = (half.T @ half for half in (rows[::2], rows[1::2]))
        self.block_size = next((b for b in blocks if not b or len(self.mean) % b == 0), 0)

    def candidates(self) -> Iterator[Tensor]:
        """Yield factors that grow with the mean magnitude of each channel."""
        for strength in STRENGTHS:
            yield factor_of(self.mean, torch.ones_like(self.mean), strength)

    def error(self, factor: Tensor) -> float:
        """Return the squared error of products of the rounded weights with the input."""
        fitted, judged = (gram / factor / factor[:, None] for gram in (self.fitted, self.judged))
        missed = 0.0
        for _, weight in self.weighted:
            rows = weight * factor
            held = nearest_to_products(rows, self.bits, self.block_size, fitted, judged, self.ways)
            missed += missed_of(rows, held, judged)
        return missed
