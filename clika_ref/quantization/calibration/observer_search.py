"""Observer search: choose one observer for all activations, or the best one for each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from clika_ref.core.errors import format_count
from clika_ref.quantization.algorithms.sensitivity import Sensitivities
from clika_ref.quantization.calibration.observers import OBSERVERS
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.placement import Placement
from clika_ref.quantization.qdq.planning import Planner

DEFAULT_OBSERVER = "min-max"
"""Default observer: better if rare elements matter, as in convolutional networks, or if samples vary in loudness."""

ALTERNATIVE_OBSERVER = "mse"
"""Alternative observer: better if rare elements belong to a few tokens."""

OBSERVER_CANDIDATES: Mapping[str, Sequence[str]] = {
    "auto": (DEFAULT_OBSERVER, ALTERNATIVE_OBSERVER),
    "every": (DEFAULT_OBSERVER, *(name for name in OBSERVERS if name != DEFAULT_OBSERVER)),
    **{name: (name,) for name in OBSERVERS},
}
"""Observers to try, by the option ``observer``; the first one is used unless another one is better.

Each further observer makes sensitivity estimation a fifth longer, and stores the errors of all activations once more.
By default, only the two that differ most are tried.
"""

MAX_SHARE_RATIO = 0.8
"""Error of an activation that another observer may leave, relative to the default, which holds for more inputs."""

MAX_ERROR_RATIO = 0.95
"""The same for the error of the whole model on held-out data."""

MAX_LOSS_ON_LARGER_INPUTS = 10**0.1
"""The same for inputs beyond the calibration data, where ranges that gain within it may lose 1 dB."""

SensitivityEstimator = Callable[[Plan, Sequence[Plan]], Sensitivities]
"""Estimates the sensitivities of a plan's layers, and the errors of its activations with the scales of rival plans."""

ErrorMeasurement = Callable[[Plan], float]
"""Measures the output error of a plan on held-out data, with the corrections that it will receive."""


@dataclass(frozen=True)
class ObserverSearchResult:
    """The chosen observers, with the plan and the error of their ranges."""

    observer: str
    """Observer of all activations that are not in ``own``."""
    plan: Plan
    """The plan with the ranges of these observers."""
    error: float
    """Error of the outputs on held-out data, as measured."""
    sensitivities: Sensitivities
    """Sensitivities of all layers with this plan."""
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """Observers of single activations, by name."""
    default: ObserverSearchResult | None = None
    """The result with the first observer for all activations, if another one is chosen."""

    @property
    def observers(self) -> str:
        """The observers in use, as text: ``min-max, mse for 2 tensors``."""
        counts = Counter(self.own.values())
        return ", ".join(
            (self.observer, *(f"{name} for {format_count(count, 'tensor')}" for name, count in counts.items()))
        )

    def observers_of(self, plan: Plan) -> dict[str, str]:
        """Return the observer of each activation of a plan, by name."""
        return {name: self.own.get(plan.scale_sources.get(name, name), self.observer) for name in plan.activations}


def search_observers(
    planner: Planner,
    placement: Placement,
    measure: ErrorMeasurement,
    estimate: SensitivityEstimator,
    observers: Sequence[str] = OBSERVER_CANDIDATES["auto"],
) -> ObserverSearchResult:
    """Choose the observers whose plan has a low output error on held-out data; the first one unless others gain.

    Up to three plans are evaluated: the first observer for all activations; the best observer for each activation; and,
    if that reduces the error, the other observer with the least predicted error for all activations. Each further plan
    must reduce the error to `MAX_ERROR_RATIO`.

    Args:
        planner: computes a plan from the calibration of the graph.
        placement: the activations and nodes to quantize.
        measure: measures the output error of a plan.
        estimate: estimates the effect of quantizing each activation on the outputs.
        observers: the observers to try.
    """
    first, *others = observers
    plan, *rivals = (planner.plan(placement, observer) for observer in observers)
    sensitivities = estimate(plan, rivals)
    default = ObserverSearchResult(first, plan, measure(plan), sensitivities)
    mixed = _choose_per_activation(default, others, planner, placement, measure)
    if mixed.error >= default.error:
        return default
    other, rival, shares = min(
        zip(others, rivals, sensitivities.rivals, strict=True),
        key=lambda candidate: sum(share for name, share in candidate[2].items() if name in sensitivities.comparable),
    )
    uniform = ObserverSearchResult(other, rival, measure(rival), sensitivities.with_shares(shares))
    best = default
    for candidate in (mixed, uniform):
        best = candidate if candidate.error < MAX_ERROR_RATIO * best.error else best
    return best if best is default else replace(best, default=default)


def _choose_per_activation(
    default: ObserverSearchResult,
    others: Sequence[str],
    planner: Planner,
    placement: Placement,
    measure: ErrorMeasurement,
) -> ObserverSearchResult:
    """Choose for each activation the observer with the least error, estimated as if it alone were quantized.

    An observer other than the default must reduce the error to `MAX_SHARE_RATIO`. An activation whose elements were
    only moved shares the range of its source. The observer of a source minimizes the sum of their errors.
    """
    sensitivities = default.sensitivities
    sources = {value.name: source.name for value, source in placement.scale_sources.items()}
    names_by_source = defaultdict[str, list[str]](list)
    for name in sensitivities.comparable:
        names_by_source[sources.get(name, name)].append(name)
    shares_by_observer = {
        default.observer: sensitivities.shares,
        **dict(zip(others, sensitivities.rivals, strict=True)),
    }

    def sum_shares(names: Sequence[str], observer: str) -> float:
        ratio = MAX_SHARE_RATIO if observer == default.observer else 1.0
        return ratio * sum(shares_by_observer[observer][name] for name in names)

    best = {
        source: min(shares_by_observer, key=partial(sum_shares, names)) for source, names in names_by_source.items()
    }
    own = {name: observer for name, observer in best.items() if observer != default.observer}
    if not own:
        return default
    plan = planner.plan(placement, default.observer, own)
    used = {name: best.get(sources.get(name, name), default.observer) for name in sensitivities.shares}
    shares = {name: shares_by_observer[observer][name] for name, observer in used.items()}
    return ObserverSearchResult(default.observer, plan, measure(plan), sensitivities.with_shares(shares), own)
