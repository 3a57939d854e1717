"""GPTQ: the rounding error of each weight element is compensated by the elements after it."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.quantization_scheme import QuantizedType

GRAM_DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal: few samples leave directions without data."""

GPTQ_BLOCK_COLUMNS = 128
"""Number of columns with errors that are applied to all later columns at once."""


@torch.no_grad()
def quantize_with_gptq(rows: Tensor, scales: Tensor, integers: QuantizedType, gram: Tensor) -> Tensor | None:
    """Return the quantized weight with the least error of its products with data, not of its elements.

    Zeros stay 0, such as those of a pruning mask.

    Args:
        rows: ``float32[outputs, inputs]``.
        scales: ``float32[outputs, blocks]``.
        integers: the quantized type.
        gram: ``x.T @ x`` of the layer's input, ``float32[inputs, inputs]``.

    Returns:
        ``int8[outputs, inputs]``, or None if the data is not finite or its Gram matrix cannot be inverted.

    Source: Frantar et al., GPTQ (2023), in the order of the columns.
    """
    chosen = _inverse_cholesky(gram)
    if chosen is None:
        return None
    left, steps = rows.clone(), torch.empty_like(rows, dtype=torch.int8)
    inputs = rows.shape[1]
    block = inputs // scales.shape[1]
    for start in range(0, inputs, GPTQ_BLOCK_COLUMNS):
        end = min(start + GPTQ_BLOCK_COLUMNS, inputs)
        missed = rows.new_zeros(len(rows), end - start)
        for at in range(start, end):
            scale = scales[:, at // block]
            whole = (left[:, at] / scale).round().clamp(integers.low, integers.high) * (rows[:, at] != 0)
            steps[:, at] = whole.to(torch.int8)
            missed[:, at - start] = (left[:, at] - whole * scale) / chosen[at, at]
            left[:, at + 1 : end] -= missed[:, at - start, None] * chosen[at, at + 1 : end]
        left[:, end:] -= missed @ chosen[start:end, end:]
    return steps


def _inverse_cholesky(gram: Tensor) -> Tensor | None:
    """Return the upper Cholesky factor of the inverse Gram matrix, None if there is none."""
    if not bool(gram.isfinite().all()):
        return None
    wide = gram.double()
    mean = wide.diagonal().mean()
    if not mean > 0:
        return None
    wide = wide + torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * GRAM_DAMPING * mean
    factor, failed = torch.linalg.cholesky_ex(wide)
    if failed:
        return None
    inverse = torch.cholesky_inverse(factor)
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper.float()
