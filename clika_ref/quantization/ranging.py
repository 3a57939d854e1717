"""Ranging: which part of each value integers cover, by one observer for all, or another where outputs come nearer."""

from __future__ import annotations

from collections import defaultdict
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
        observer: one for all; where it is not given, each value has the better one of two, and where that helps, the
            second one for all is tried as well.
    """
    if observer:
        plan = planner.plan(placement, observer)
        return Ranging(observer, plan, trial.error(plan), weigh(plan, []))
    plan, rival = planner.plan(placement, FIRST), planner.plan(placement, RIVAL)
    weighed = weigh(plan, [rival])
    found = Ranging(FIRST, plan, trial.error(plan), weighed)
    mixed = _mixed(found, planner, placement, trial)
    if mixed.error >= found.error:
        return found
    whole = Ranging(RIVAL, rival, trial.error(rival), weighed.with_shares(weighed.rivals[0]))
    return min(mixed, whole, key=lambda ranging: ranging.error)


def _mixed(found: Ranging, planner: Planner, placement: Placement, trial: Trial) -> Ranging:
    """Return ranges of which the rival gives those by which outputs come nearer, were each alone.

    What is moved has the range of what it was before: of both together one observer is the better one.
    """
    sources = {value.name: source.name for value, source in placement.scaled_as.items()}
    shares, (rival,) = found.weighed.shares, found.weighed.rivals
    gains: defaultdict[str, float] = defaultdict(float)
    for name, share in shares.items():
        gains[sources.get(name, name)] += share - rival[name]
    own = {name: RIVAL for name, gain in gains.items() if gain > 0}
    if not own:
        return found
    plan = planner.plan(placement, found.observer, own)
    better = {name: rival[name] for name in shares if sources.get(name, name) in own}
    return Ranging(found.observer, plan, trial.error(plan), found.weighed.with_shares(better), own)
