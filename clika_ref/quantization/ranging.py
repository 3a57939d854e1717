"""Ranging: which part of each value integers cover, by one observer for all, or by the best one of each value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from clika_ref.quantization.observers import OBSERVERS
from clika_ref.quantization.placement import Placement
from clika_ref.quantization.planning import Planner
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.sensitivity import Sensitivities
from clika_ref.quantization.trials import Trial

FIRST = "mean of extremes"
"""What all values are observed by at first: the better one where rare elements matter, as in convolutional networks."""

RIVAL = "least error"
"""What a value is observed by instead where outputs come nearer, as where rare elements belong to a few tokens."""

TRIED: Mapping[str, Sequence[str]] = {
    "auto": (FIRST, RIVAL),
    "every": (FIRST, *(name for name in OBSERVERS if name != FIRST)),
    **{name: (name,) for name in OBSERVERS},
}
"""The observers between which each value has its own, by the option ``observer``; the first one is that of all others.

Each more of them makes weighing a fifth longer and holds the errors of all values once more: the two that differ most
are tried unasked.
"""

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
        counts = Counter(self.own.values())
        return ", ".join((self.observer, *(f"of {count} values by {name}" for name, count in counts.items())))

    def observers_of(self, plan: Plan) -> dict[str, str]:
        """Return which observer the range of each value of a plan is by, by their names."""
        return {name: self.own.get(plan.scaled_as.get(name, name), self.observer) for name in plan.activations}


def ranged(
    planner: Planner, placement: Placement, trial: Trial, weigh: Weigh, observers: Sequence[str] = TRIED["auto"]
) -> Ranging:
    """Return the ranges that are nearest to float in a trial.

    Args:
        planner: of the graph.
        placement: what becomes integers.
        trial: what decides.
        weigh: tells what integers of each value do to the outputs.
        observers: the first for all values, or for each value its best one; where these help, that one for all
            which is foreseen to be the best of the others is tried as well.
    """
    first, *others = observers
    plan, *rivals = (planner.plan(placement, observer) for observer in observers)
    weighed = weigh(plan, rivals)
    found = Ranging(first, plan, trial.error(plan), weighed)
    mixed = _mixed(found, others, planner, placement, trial)
    if mixed.error >= found.error:
        return found
    whole = [
        (sum(shares.values()), other, rival, shares)
        for other, rival, shares in zip(others, rivals, weighed.rivals, strict=True)
    ]
    _, other, rival, shares = min(whole, key=lambda one: one[0])
    alone = Ranging(other, rival, trial.error(rival), weighed.with_shares(shares))
    return min(mixed, alone, key=lambda ranging: ranging.error)


def _mixed(found: Ranging, others: Sequence[str], planner: Planner, placement: Placement, trial: Trial) -> Ranging:
    """Return ranges of which each is by the observer by which outputs come nearest, were it alone.

    What is moved has the range of what it was before: of both together one observer is the best.
    """
    sources = {value.name: source.name for value, source in placement.scaled_as.items()}
    every = {found.observer: found.weighed.shares, **dict(zip(others, found.weighed.rivals, strict=True))}
    moved = defaultdict[str, list[str]](list)
    for name in found.weighed.shares:
        moved[sources.get(name, name)].append(name)

    def share(names: Sequence[str], observer: str) -> float:
        return sum(every[observer][name] for name in names)

    best = {source: min(every, key=partial(share, names)) for source, names in moved.items()}
    own = {name: observer for name, observer in best.items() if observer != found.observer}
    if not own:
        return found
    plan = planner.plan(placement, found.observer, own)
    shares = {name: every[best[sources.get(name, name)]][name] for name in found.weighed.shares}
    return Ranging(found.observer, plan, trial.error(plan), found.weighed.with_shares(shares), own)
