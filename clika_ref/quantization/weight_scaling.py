"""Weight scaling: what is multiplied with large elements is rounded finer, where something before divides for free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clika_ref.quantization.factors import Channels
from clika_ref.quantization.smoothing import STRENGTHS, factor_of
from clika_ref.quantization.weights_only import Ways, missed_of, nearest_to_products


class FewBitReading:
    """Tries factors for layers that read floats, with weights that are rounded to few bits as they will be.

    One half of what was read shows how to round, the other what that misses.

    Source: Lin et al., AWQ: Activation-aware Weight Quantization (2024), section 3.2.
    """

    def __init__(
        self, channels: Channels, x: Tensor, bits: int, blocks: Sequence[int], ways: Ways | None = None
    ) -> None:
        """Try weights of so many bits, in the first blocks that fit.

        Args:
            channels: of a value that layers with matrices read.
            x: what the value held.
            bits: of weights.
            blocks: sizes of blocks in the order of preference, 0 for one scale in a row.
            ways: how they are rounded.
        """
        self.weighted, self.bits, self.ways = channels.weighted(), bits, ways or Ways()
        rows = channels.rows(x).float()
        self.mean = rows.abs().mean(0)
        self.fitted, self.judged = (half.T @ half for half in (rows[::2], rows[1::2]))
        self.block_size = next((b for b in blocks if not b or len(self.mean) % b == 0), 0)

    def candidates(self) -> Iterator[Tensor]:
        """Return factors that grow with what channels hold on average."""
        for strength in STRENGTHS:
            yield factor_of(self.mean, torch.ones_like(self.mean), strength)

    def error(self, factor: Tensor) -> float:
        """Return the squares of what rounded weights miss of products with what was read."""
        fitted, judged = (gram / factor / factor[:, None] for gram in (self.fitted, self.judged))
        missed = 0.0
        for _, weight in self.weighted:
            rows = weight * factor
            held = nearest_to_products(rows, self.bits, self.block_size, fitted, judged, self.ways)
            missed += missed_of(rows, held, judged)
        return missed
