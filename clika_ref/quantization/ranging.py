"""Ranging: which part of each value integers cover, by one observer for all, or another where outputs come nearer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clika_ref.quantization.placement import Placement
from clika_ref.quantization.planning import Planner
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.sensitivity import Sensitivities
from clika_ref.quantization.trials import Trial

FIRST = "mean of extremes"
"""What all values are observed by at first: the better one where rare elements matter, as in convolutional networks."""

RIVAL = "least error"
"""What a value is observed by instead where outputs come nearer, as where rare elements belong to a few tokens."""

Weigh = Callable[[Plan, Sequence[Plan]], Sensitivities]
"""Weighs the layers of a plan, and its values by the scales of rivals as well."""


@dataclass(frozen=True)
class Ranging:
    """Ranges for all values, and what becomes of a graph with them."""

    observer: str
    """Of all values but those that have their own."""
    plan: Plan
    error: float
    """Of the outputs on data that decided nothing."""
    weighed: Sensitivities
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """The observers of other values, by the names of these."""

    @property
    def observers(self) -> str:
        """Which there are, in words."""
        return f"{self.observer}, of {len(self.own)} values by {RIVAL}" if self.own else self.observer


def ranged(planner: Planner, placement: Placement, trial: Trial, weigh: Weigh, observer: str = "") -> Ranging:
    """Return the ranges that a user asks for, or those that are nearest to float in a trial.

    Args:
        planner: of the graph.
        placement: what becomes integers.
        trial: what decides.
        weigh: tells what integers of each value do to the outputs.
        observer: one for all; where it is not given, each value has the better one of two.
    """
    if observer:
        plan = planner.plan(placement, observer)
        return Ranging(observer, plan, trial.error(plan), weigh(plan, []))
    plan = planner.plan(placement, FIRST)
    weighed = weigh(plan, [planner.plan(placement, RIVAL)])
    one = Ranging(FIRST, plan, trial.error(plan), weighed)
    (rival,) = weighed.rivals
    better = {name: rival[name] for name, share in weighed.shares.items() if rival[name] < share}
    own = dict.fromkeys(better, RIVAL)
    mixed = planner.plan(placement, FIRST, own)
    other = Ranging(FIRST, mixed, trial.error(mixed), weighed.with_shares(better), own)
    return min(one, other, key=lambda ranging: ranging.error)
