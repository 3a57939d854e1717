"""Rounding with feedback: what one element of a weight misses, the elements behind it make up for."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.quantization_scheme import Integers

DAMPING = 0.01
"""Of the mean of the diagonal, added to it: few samples leave directions in which nothing was seen."""

COLUMNS = 128
"""Whose errors are spread at once to all that lie behind."""


@torch.no_grad()
def rounded_with_feedback(rows: Tensor, scales: Tensor, integers: Integers, gram: Tensor) -> Tensor | None:
    """Return integers of a weight with which its products with data, not its elements, miss least.

    Zeros stay zeros, as those are of a mask.

    Args:
        rows: ``float32[outputs, inputs]``.
        scales: ``float32[outputs, blocks]``.
        integers: the kind that stands for them.
        gram: ``x.T @ x`` of what the layer reads, ``float32[inputs, inputs]``.

    Returns:
        ``int8[outputs, inputs]``, or None where the data is not finite, or leaves no way to solve for it.

    Source: Frantar et al., GPTQ (2023), in the order of the columns.
    """
    chosen = _feedback(gram)
    if chosen is None:
        return None
    left, steps = rows.clone(), torch.empty_like(rows, dtype=torch.int8)
    inputs = rows.shape[1]
    block = inputs // scales.shape[1]
    for start in range(0, inputs, COLUMNS):
        end = min(start + COLUMNS, inputs)
        missed = rows.new_zeros(len(rows), end - start)
        for at in range(start, end):
            scale = scales[:, at // block]
            whole = (left[:, at] / scale).round().clamp(integers.low, integers.high) * (rows[:, at] != 0)
            steps[:, at] = whole.to(torch.int8)
            missed[:, at - start] = (left[:, at] - whole * scale) / chosen[at, at]
            left[:, at + 1 : end] -= missed[:, at - start, None] * chosen[at, at + 1 : end]
        left[:, end:] -= missed @ chosen[start:end, end:]
    return steps


def _feedback(gram: Tensor) -> Tensor | None:
    """Return the upper triangle by whose rows errors are spread, None where there is none."""
    if not bool(gram.isfinite().all()):
        return None
    wide = gram.double()
    mean = wide.diagonal().mean()
    if not mean > 0:
        return None
    wide = wide + torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * DAMPING * mean
    factor, failed = torch.linalg.cholesky_ex(wide)
    if failed:
        return None
    inverse = torch.cholesky_inverse(factor)
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper.float()
