"""Inputs that tell two functions apart: random values in the shapes of a call, whatever values the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TRUSTING = frozenset({"embedding_bag"})
"""Operators of which PyTorch reads memory where operands point, without a look: made-up ones end the process."""

DRAWS = 2
"""Ways to draw values: normal first, then positive, where a root or a logarithm left nothing finite of the first."""


def is_telling(leaves: Sequence[Any]) -> bool:
    """Whether the values of a call tell as much as random ones: none of them makes up more than half of its tensor."""
    return all(_is_varied(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel())


def _is_varied(x: torch.Tensor) -> bool:
    values = (torch.view_as_real(x) if x.is_complex() else x).detach().flatten().float()
    middle = values.nanmedian()  # what fills more than half of a tensor is its median
    return bool(middle.isfinite()) and int((values == middle).sum()) * 2 <= values.numel()


def redrawn(leaves: Sequence[Any], draw: int, *, positions: bool) -> list[Any]:
    """Return leaves with random values in place of their own, the same at each call.

    Args:
        leaves: what a call is made of; only tensors change.
        draw: which of the `DRAWS`.
        positions: whether integers and truth values are drawn too, integers from the range of those given (one
            more where all are equal) rather than kept: some models take few of
            them, such as lengths that must fit each other.

    """
    generator = torch.Generator().manual_seed(draw)
    return [_redrawn(leaf, draw, positions, generator) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _redrawn(x: torch.Tensor, draw: int, positions: bool, generator: torch.Generator) -> torch.Tensor:  # noqa: FBT001 - passed on
    if x.is_floating_point() or x.is_complex():
        sample = torch.rand if draw % 2 else torch.randn
        values = sample(x.shape, generator=generator, dtype=torch.complex64 if x.is_complex() else torch.float32)
    elif not positions or x.numel() == 0:
        return x
    elif x.dtype == torch.bool:
        values = torch.rand(x.shape, generator=generator) < 0.5
    else:
        low, high = int(x.min()), int(x.max())
        values = torch.randint(low, max(high, low + 1) + 1, x.shape, generator=generator)
    return values.to(x.device, x.dtype)
