"""AWQ: round weights of large activations more finely, where a preceding node absorbs the division at no cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clika_ref.quantization.algorithms.smooth_quant import SMOOTHING_STRENGTHS, compute_factor
from clika_ref.quantization.algorithms.weight_only import quantize_low_bit, sum_squared_product_error
from clika_ref.quantization.qdq.channel_scales import ScalableChannels
from clika_ref.settings.compile_options import ClikaCompileOptions


class LowBitWeightEvaluator:
    """Evaluates factors for layers with float inputs and low-bit weights, rounded as they will be.

    One half of the input rows fits the rounding, the other half measures the error.

    Source: Lin et al., AWQ: Activation-aware Weight Quantization (2024), section 3.2.
    """

    def __init__(
        self, channels: ScalableChannels, x: Tensor, bits: int, blocks: Sequence[int], options: ClikaCompileOptions
    ) -> None:
        """Prepare an evaluation with the first block size that fits.

        Args:
            channels: of a value that layers with matrices read.
            x: tensor of the value.
            bits: of the weights.
            blocks: block sizes in order of preference, 0 for one scale per row.
            options: options of the rounding.
        """
        self.layer_weights, self.bits, self.options = channels.layer_weights(), bits, options
        rows = channels.rows(x).float()
        self.mean = rows.abs().mean(0)
        self.fitted, self.judged = (half.T @ half for half in (rows[::2], rows[1::2]))
        self.block_size = next((b for b in blocks if not b or len(self.mean) % b == 0), 0)

    def candidates(self) -> Iterator[Tensor]:
        """Yield factors that grow with the mean magnitude of each channel."""
        for strength in SMOOTHING_STRENGTHS:
            yield compute_factor(self.mean, torch.ones_like(self.mean), strength)

    def error(self, factor: Tensor) -> float:
        """Return the squared error of products of the rounded weights with the input."""
        fitted, judged = (gram / factor / factor[:, None] for gram in (self.fitted, self.judged))
        squared_error = 0.0
        for _, weight in self.layer_weights:
            rows = weight * factor
            packed = quantize_low_bit(rows, self.bits, self.block_size, fitted, judged, self.options)
            squared_error += sum_squared_product_error(rows, packed, judged)
        return squared_error
