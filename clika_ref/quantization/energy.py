"""Energies of outputs, and of what they miss: without elements that masks put there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ENDLESS = 1e30
"""Elements from here on are what a mask put there: infinities, or the least number of a dtype."""


def energy(x: Tensor) -> float:
    """Return the squares of elements, summed: of an output its signal, of a difference its noise."""
    return float(bounded(x.detach().double()).square().sum())


def missed(found: Tensor, wanted: Tensor) -> float:
    """Return the energy of what an output misses of another one; where both are masked, or not a number, nothing."""
    return float(_differences(found, wanted).square().sum())


def missed_by_sample(found: Tensor, wanted: Tensor, samples: int) -> list[float]:
    """Return the same of each of so many equal parts along the first side."""
    return _differences(found, wanted).square().reshape(samples, -1).sum(1).tolist()


def missed_share(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """Return ``||F - W||^2 / ||W||^2``, the mean of it over all outputs that are not 0."""
    return mean_share((missed(f, w), energy(w)) for f, w in zip(found, wanted, strict=True))


def mean_share(parts: Iterable[tuple[float, float]]) -> float:
    """Return the mean of shares, each given as a part and its whole; of nothing there is none."""
    shares = [part / whole for part, whole in parts if whole]
    return sum(shares) / len(shares) if shares else 0.0


def bounded(x: Tensor) -> Tensor:
    """Return elements with 0 in place of what masks put there."""
    return x.masked_fill(_is_endless(x) | x.isnan(), 0.0)


def _differences(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = found.detach().double(), wanted.detach().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan()) | (_is_endless(found) & _is_endless(wanted))
    return (found - wanted).masked_fill(same, 0.0)


def _is_endless(x: Tensor) -> Tensor:
    return torch.abs(x) >= ENDLESS
