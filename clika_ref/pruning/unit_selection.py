"""Choose the units of each group to remove, limited by sensitivity and sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from torch import Tensor

from clika_ref.pruning.groups import UnitGroup
from clika_ref.pruning.importance import UnitEffects
from clika_ref.pruning.layer_settings import PruningChoice

CHANNEL_MULTIPLE = 8
"""Channels that kernels process at once: ONNX Runtime's blocked convolutions and tensor cores use multiples of it."""


@dataclass(frozen=True)
class UnitRemoval:
    """The units to remove from a group."""

    units: Sequence[int]
    sensitivity: float | None
    """Relative squared error of the outputs without them; None if it was not estimated."""
    reason: str = ""
    """Why nothing is removed; empty otherwise."""


def choose_removal(group: UnitGroup, choice: PruningChoice, effects: UnitEffects) -> UnitRemoval:
    """Return the units to remove from a group: those of least importance, up to the limit of their joint effect.

    With a threshold, the number of remaining channels is a multiple of `CHANNEL_MULTIPLE`, if there are enough; a
    sparsity without a threshold is met exactly.
    """
    rows = effects.of(group.units)
    order = rows.square().sum(0).argsort(stable=True)
    together = rows[:, order].cumsum(1).square().sum(0)
    total = len(group.units)
    most = total - 1 if choice.sparsity is None else min(round(total * choice.sparsity), total - 1)
    let = most if choice.threshold is None else min(most, _count_within(together, choice.threshold))
    most = let if choice.threshold is None else _round_to_multiple(group, let)
    if not most:
        least = float(together[0])
        if let:
            why = (
                f"only {let} of {total} {group.kind} can be removed, too few to keep a multiple of {CHANNEL_MULTIPLE} "
                "channels"
            )
            return UnitRemoval([], least, why)
        if choice.threshold is None or least <= choice.threshold:
            return UnitRemoval([], least, f"{total} {group.kind} are too few to remove one")
        limit = f"pruning_sensitivity_threshold={choice.threshold:g}"
        return UnitRemoval(
            [], least, f"too sensitive: {least:.2g} without the least important of its {group.kind} is above {limit}"
        )
    return UnitRemoval([group.units[i] for i in order[:most].tolist()], float(together[most - 1]))


def _count_within(together: Tensor, threshold: float) -> int:
    """Return how many units can be removed before the joint effect exceeds a threshold."""
    above = (together > threshold).nonzero()
    return int(above[0]) if len(above) else len(together)


def _round_to_multiple(group: UnitGroup, most: int) -> int:
    """Return how many units to remove so that a multiple of `CHANNEL_MULTIPLE` channels remains, if that removes any.

    The limit itself is returned for groups with too few channels, or if the fixed channels make a multiple impossible.
    """
    total = len(group.units)
    if group.fixed + group.places * total <= lcm(CHANNEL_MULTIPLE, group.places) or group.fixed % gcd(
        CHANNEL_MULTIPLE, group.places
    ):
        return most
    whole = (kept for kept in range(total - most, total) if not (group.fixed + group.places * kept) % CHANNEL_MULTIPLE)
    return total - next(whole, total)
