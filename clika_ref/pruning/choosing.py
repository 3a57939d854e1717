"""How much of each group goes, and of each weight: as much as its sensitivity lets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from torch import Tensor

from clika_ref.pruning.effects import Effects
from clika_ref.pruning.groups import Group
from clika_ref.pruning.layers import Choice

LANES = 8
"""Channels that kernels compute at once: ONNX Runtime's blocked convolutions and tensor cores have multiples of it."""


@dataclass(frozen=True)
class Removal:
    """What goes of a group."""

    units: Sequence[int]
    sensitivity: float | None
    """What the outputs miss without them, as a share of their energy; None where that was not asked."""
    reason: str = ""
    """Why nothing goes, where nothing does."""


def removal(group: Group, choice: Choice, effects: Effects) -> Removal:
    """Return what goes of a group: units of least effect first, as long as all that go together have little.

    What stays where a threshold decides is a multiple of `LANES` channels, where there are as many; a share that is
    asked for without a threshold is taken exactly.
    """
    rows = effects.of(group.units)
    order = rows.square().sum(0).argsort(stable=True)
    together = rows[:, order].cumsum(1).square().sum(0)
    total = len(group.units)
    most = total - 1 if choice.sparsity is None else min(round(total * choice.sparsity), total - 1)
    let = most if choice.threshold is None else min(most, _within(together, choice.threshold))
    most = let if choice.threshold is None else _whole_lanes(group, let)
    if not most:
        least = float(together[0])
        if let:
            why = f"{let} of {total} {group.kind} may go, too few for what stays to be a multiple of {LANES} channels"
            return Removal([], least, why)
        if choice.threshold is None or least <= choice.threshold:
            return Removal([], least, f"{total} {group.kind} are too few to leave one out")
        limit = f"pruning_sensitivity_threshold={choice.threshold:g}"
        return Removal([], least, f"too sensitive: {least:.2g} without the least of its {group.kind} is above {limit}")
    return Removal([group.units[i] for i in order[:most].tolist()], float(together[most - 1]))


def _within(together: Tensor, threshold: float) -> int:
    """Return how many go before their effects exceed a threshold for the first time."""
    above = (together > threshold).nonzero()
    return int(above[0]) if len(above) else len(together)


def _whole_lanes(group: Group, most: int) -> int:
    """Return how many go so that the channels that stay are a multiple of lanes, where that leaves out any.

    As many go as may where there are too few for that, or where those that stay anyway let it be at no number.
    """
    total = len(group.units)
    if group.fixed + group.places * total <= lcm(LANES, group.places) or group.fixed % gcd(LANES, group.places):
        return most
    whole = (kept for kept in range(total - most, total) if not (group.fixed + group.places * kept) % LANES)
    return total - next(whole, total)
