"""Random inputs that show differences between two functions: the shapes of a call, with other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

UNSAFE_ON_OTHER_INPUTS = frozenset({"embedding_bag", "while_loop"})
"""Operators that run only on inputs of the user: they read memory at unchecked indices, or may loop forever."""

DISTRIBUTION_COUNT = 2
"""Number of distributions to draw from: normal, then positive for models with no finite result of the first."""


def is_informative(leaves: Sequence[Any]) -> bool:
    """Whether the values of a call are as informative as random ones: no value fills more than half of its tensor."""
    return all(_is_varied(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel())


def _is_varied(x: torch.Tensor) -> bool:
    values = (torch.view_as_real(x) if x.is_complex() else x).detach().flatten().float()
    middle = values.nanmedian()  # a value that fills more than half of a tensor is its median
    return bool(middle.isfinite()) and int((values == middle).sum()) * 2 <= values.numel()


def redraw(leaves: Sequence[Any], draw: int, *, positions: bool) -> list[Any]:
    """Return leaves with random values, the same at each call.

    Args:
        leaves: the leaves of a call; only tensors change.
        draw: the index of the distribution, below `DISTRIBUTION_COUNT`.
        positions: whether to also draw integers and bools. Integers are drawn from the range of the given ones (one
            more if all are equal). Otherwise they are kept, as some models accept only a few, such as lengths that must
            match.
    """
    generator = torch.Generator().manual_seed(draw)
    return [
        _redraw_tensor(leaf, draw, positions, generator) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]


def _redraw_tensor(x: torch.Tensor, draw: int, positions: bool, generator: torch.Generator) -> torch.Tensor:  # noqa: FBT001 - passed on
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
