"""The search for the most that can be quantized before a score falls too far: fewest evaluations, best so far kept."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref.core.errors import ModelError
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization_settings import QuantizationSettings
from clika_ref.reporting.tables import Table, Told

EVERYTHING = sys.float_info.max
"""A threshold that no layer is above."""


@dataclass(frozen=True, slots=True)
class GoalTrial:
    """One quantization that was scored."""

    threshold: float
    """The ``quantization_sensitivity_threshold`` that gives it; infinite where it leaves no layer float."""
    found: Quantization
    """What was decided."""
    score: float
    """Of the user, of which more is better."""
    drop: float
    """By how much the score is below that of the float model."""
    is_within: bool
    """Whether the drop is ``max_drop`` at most."""

    @property
    def layers(self) -> int:
        """How many layers are in integers."""
        return sum(not layer.reason for layer in self.found.layers)

    @property
    def bytes(self) -> int:
        """How many bytes the file has, as `WhatIf` counts them."""
        return self.found.bytes


TRIALS: Mapping[str, Callable[[GoalTrial], object]] = {
    "threshold": lambda trial: trial.threshold,
    "layers in integers": lambda trial: trial.layers,
    "bytes of the file": lambda trial: trial.bytes,
    "score": lambda trial: f"{trial.score:g}",
    "drop": lambda trial: f"{trial.drop:g}",
    "within max_drop": lambda trial: "yes" if trial.is_within else "no",
}


@dataclass(repr=False)
class GoalSearch(Told):
    """Bisects the thresholds at which one more layer is quantized, as many as make the score fall by ``max_drop``.

    Where layers have widths to choose from, these are those at which one may take its narrowest, or its widest. Scores
    need not fall with each layer: of all that were tried and stay within, that with the fewest bytes is best.

    Raises:
        ModelError: ``max_drop`` is no number from 0.
    """

    max_drop: float
    baseline: float = math.nan
    """The score of the float model."""
    trials: list[GoalTrial] = field(default_factory=list[GoalTrial])
    """Each quantization that was scored, in order."""
    reason: str = ""
    """Once it is done: why no more is quantized; nothing where no threshold would quantize more."""
    is_done: bool = False
    """Whether the search came to its end, and was not interrupted."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.max_drop, int | float) and not isinstance(self.max_drop, bool)
        if not is_number or not 0 <= self.max_drop < math.inf:
            msg = f"max_drop is {self.max_drop!r}; it takes a number from 0, by which the score may fall"
            raise ModelError(msg)

    @property
    def best(self) -> GoalTrial | None:
        """The trial within ``max_drop`` that has the fewest bytes; None where only the float model is."""
        return min((t for t in self.trials if t.is_within), key=lambda t: t.bytes, default=None)

    def settings(self, chosen: QuantizationSettings) -> QuantizationSettings:
        """Return settings by which other targets quantize as much: with the threshold of the best trial.

        With one of 0, which quantizes nothing, where only the float model is within ``max_drop``.
        """
        threshold = min(self.best.threshold, EVERYTHING) if self.best is not None else 0.0
        return chosen.with_threshold(threshold)

    def run(
        self, decided: Callable[[float], Quantization], score: Callable[[Quantization | None], float]
    ) -> GoalSearch:
        """Search; after an error, what was tried until then is kept.

        Args:
            decided: returns what a threshold quantizes.
            score: evaluates a quantization, or the float model for None; more is better.

        Raises:
            ModelError: a score is no finite number.
        """
        self.baseline = _finite(score(None))
        whole = decided(EVERYTHING)
        if whole.what_if and not self._try(math.inf, whole, score):
            finest = decided(0.0)  # which lets nothing pass, so that each layer comes to its widest integers
            thresholds = sorted({row.threshold for row in (*whole.what_if, *finest.what_if)})
            within, above = -1, len(thresholds) - 1  # the last one gives the whole
            while above - within > 1:
                middle = (within + above) // 2
                threshold = thresholds[middle]
                if self._try(threshold, decided(threshold), score):
                    within = middle
                else:
                    above = middle
        self.reason = self._reason(whole)
        self.is_done = True
        return self

    def _try(self, threshold: float, found: Quantization, score: Callable[[Quantization | None], float]) -> bool:
        reached = _finite(score(found))
        drop = self.baseline - reached
        self.trials.append(GoalTrial(threshold, found, reached, drop, drop <= self.max_drop))
        return drop <= self.max_drop

    def _reason(self, whole: Quantization) -> str:
        failed = [trial for trial in self.trials if not trial.is_within]
        if not whole.what_if:
            return "no layer can be quantized: the summary says why for each"
        if not failed:
            return f"{', '.join(whole.spared)} stay float unless sparing is 'off'" if whole.spared else ""
        least = max(failed, key=lambda trial: trial.bytes)
        last = max((x for x in least.found.layers if not x.reason), key=lambda x: x.sensitivity or 0.0, default=None)
        named = f", {last.scope or last.name} the most sensitive of them" if last else ""
        fall = f"the score falls by {least.drop:g}, more than max_drop={self.max_drop:g}"
        advice = "; allow more, or train the model further" if self.best is None else ""
        return f"with {least.layers} layers in integers{named}, {fall}{advice}"

    @property
    def table(self) -> Table[GoalTrial]:
        """The trials, in their order."""
        return Table(self.trials, TRIALS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.in_one_line()

    def in_one_line(self) -> str:
        """Return what was found, and why no more."""
        best, kept = self.best, "the model stays float"
        if best is not None:
            kept = f"{best.layers} layers in integers, the score falls by {best.drop:g}"
        why = f"; {self.reason}" if self.reason else ""
        return f"{kept}, after {len(self.trials) + 1} evaluations{why}"


def _finite(score: object) -> float:
    try:
        found = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        msg = f"eval_fn returned {score!r}; it takes the module and returns a finite number, of which more is better"
        raise ModelError(msg)
    return found
