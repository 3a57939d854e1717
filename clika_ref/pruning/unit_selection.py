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
    joint_effects = rows[:, order].cumsum(1).square().sum(0)
    total = len(group.units)
    max_count = total - 1 if choice.sparsity is None else min(round(total * choice.sparsity), total - 1)
    let = max_count if choice.threshold is None else min(max_count, _count_within(joint_effects, choice.threshold))
    max_count = let if choice.threshold is None else _round_to_multiple(group, let)
    if not max_count:
        lowest_effect = float(joint_effects[0])
        if let:
            why = (
                f"only {let} of {total} {group.kind} can be removed, too few to keep a multiple of {CHANNEL_MULTIPLE} "
                "channels"
            )
            return UnitRemoval([], lowest_effect, why)
        if choice.threshold is None or lowest_effect <= choice.threshold:
            return UnitRemoval([], lowest_effect, f"{total} {group.kind} are too few to remove one")
        limit = f"pruning_sensitivity_threshold={choice.threshold:g}"
        return UnitRemoval(
            [],
            lowest_effect,
            f"too sensitive: {lowest_effect:.2g} without the least important of its {group.kind} is above {limit}",
        )
    return UnitRemoval([group.units[i] for i in order[:max_count].tolist()], float(joint_effects[max_count - 1]))


def _count_within(joint_effects: Tensor, threshold: float) -> int:
    """Return how many units can be removed before the joint effect exceeds a threshold."""
    above = (joint_effects > threshold).nonzero()
    return int(above[0]) if len(above) else len(joint_effects)


def _round_to_multiple(group: UnitGroup, max_count: int) -> int:
    """Return how many units to remove so that a multiple of `CHANNEL_MULTIPLE` channels remains, if that removes any.

    The limit itself is returned for groups with too few channels, or if the fixed channels make a multiple impossible.
    """
    total = len(group.units)
    if group.fixed + group.channels_per_unit * total <= lcm(
        CHANNEL_MULTIPLE, group.channels_per_unit
    ) or group.fixed % gcd(CHANNEL_MULTIPLE, group.channels_per_unit):
        return max_count
    whole = (
        kept
        for kept in range(total - max_count, total)
        if not (group.fixed + group.channels_per_unit * kept) % CHANNEL_MULTIPLE
    )
    return total - next(whole, total)
