"""Observer search: one observer for all values, or the best one for each value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from clika_ref.core.errors import format_count
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation
from clika_ref.quantization.algorithms.sensitivity import Sensitivities
from clika_ref.quantization.calibration.observers import OBSERVERS
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.placement import Placement
from clika_ref.quantization.qdq.planning import Planner

DEFAULT_OBSERVER = "mean-min-max"
"""Default observer of all values: better if rare elements matter, as in convolutional networks."""

ALTERNATIVE_OBSERVER = "mse"
"""Alternative observer of a value: better if rare elements belong to a few tokens."""

OBSERVER_CANDIDATES: Mapping[str, Sequence[str]] = {
    "auto": (DEFAULT_OBSERVER, ALTERNATIVE_OBSERVER),
    "every": (DEFAULT_OBSERVER, *(name for name in OBSERVERS if name != DEFAULT_OBSERVER)),
    **{name: (name,) for name in OBSERVERS},
}
"""Observers that each value can have, by the option ``observer``; the first one is the default of all others.

Each further observer makes sensitivity estimation a fifth longer, and keeps the errors of all values once more. By
default, only the two that differ most are tried.
"""

SensitivityEstimator = Callable[[Plan, Sequence[Plan]], Sensitivities]
"""Estimates the sensitivities of a plan's layers, and of its values with the scales of rivals as well."""


@dataclass(frozen=True)
class ObserverSearchResult:
    """Ranges of all values, and the plan and error that follow from them."""

    observer: str
    """Observer of all values without their own."""
    plan: Plan
    error: float
    """Error of the outputs on held-out data."""
    sensitivities: Sensitivities
    """Sensitivities of all layers with this plan."""
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """Observers of single values, by value name."""

    @property
    def observers(self) -> str:
        """The observers in use, in words."""
        counts = Counter(self.own.values())
        return ", ".join(
            (self.observer, *(f"{name} for {format_count(count, 'tensor')}" for name, count in counts.items()))
        )

    def observers_of(self, plan: Plan) -> dict[str, str]:
        """Return the observer of each value of a plan, by name."""
        return {name: self.own.get(plan.scale_sources.get(name, name), self.observer) for name in plan.activations}


def search_observers(
    planner: Planner,
    placement: Placement,
    evaluation: CandidateEvaluation,
    estimate: SensitivityEstimator,
    observers: Sequence[str] = OBSERVER_CANDIDATES["auto"],
) -> ObserverSearchResult:
    """Choose the ranges with the least output error on held-out data.

    Args:
        planner: of the graph.
        placement: the values and nodes to quantize.
        evaluation: evaluates plans.
        estimate: estimates the effect of quantizing each value on the outputs.
        observers: the first is for all values, unless each value's best one gives a lower error. In that case, the
            other observer with the least predicted error is also tried for all values.
    """
    first, *others = observers
    plan, *rivals = (planner.plan(placement, observer) for observer in observers)
    sensitivities = estimate(plan, rivals)
    found = ObserverSearchResult(first, plan, evaluation.error(plan), sensitivities)
    mixed = _search_per_value(found, others, planner, placement, evaluation)
    if mixed.error >= found.error:
        return found
    whole = [
        (sum(shares.values()), other, rival, shares)
        for other, rival, shares in zip(others, rivals, sensitivities.rivals, strict=True)
    ]
    _, other, rival, shares = min(whole, key=lambda one: one[0])
    candidate = ObserverSearchResult(other, rival, evaluation.error(rival), sensitivities.with_shares(shares))
    return min(mixed, candidate, key=lambda ranging: ranging.error)


def _search_per_value(
    found: ObserverSearchResult,
    others: Sequence[str],
    planner: Planner,
    placement: Placement,
    evaluation: CandidateEvaluation,
) -> ObserverSearchResult:
    """Return ranges with the best observer for each value, if only that value were quantized.

    A moved value has the range of its source; both together get the observer that is best for both.
    """
    sources = {value.name: source.name for value, source in placement.scale_sources.items()}
    every = {found.observer: found.sensitivities.shares, **dict(zip(others, found.sensitivities.rivals, strict=True))}
    replaced = defaultdict[str, list[str]](list)
    for name in found.sensitivities.shares:
        replaced[sources.get(name, name)].append(name)

    def total_share(names: Sequence[str], observer: str) -> float:
        return sum(every[observer][name] for name in names)

    best = {source: min(every, key=partial(total_share, names)) for source, names in replaced.items()}
    own = {name: observer for name, observer in best.items() if observer != found.observer}
    if not own:
        return found
    plan = planner.plan(placement, found.observer, own)
    shares = {name: every[best[sources.get(name, name)]][name] for name in found.sensitivities.shares}
    return ObserverSearchResult(
        found.observer, plan, evaluation.error(plan), found.sensitivities.with_shares(shares), own
    )
