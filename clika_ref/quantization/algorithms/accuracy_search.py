"""Accuracy search: quantize as much as possible before a score drops too far, with few evaluations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref.core.errors import ModelError, format_count
from clika_ref.quantization.decision import Quantization
from clika_ref.reporting.tables import HasTables, Table
from clika_ref.settings.quantization import QuantizationSettings

MAX_THRESHOLD = sys.float_info.max
"""A threshold above all sensitivities."""


@dataclass(frozen=True, slots=True)
class ScoredQuantization:
    """A quantization with its score."""

    threshold: float
    """Its ``quantization_sensitivity_threshold``; infinite if it keeps no layer in float."""
    found: Quantization
    """The quantization."""
    score: float
    """Score of the user's function; higher is better."""
    drop: float
    """Score of the float model minus this score."""
    is_within: bool
    """Whether the drop is at most ``max_drop``."""

    @property
    def layers(self) -> int:
        """Number of quantized layers."""
        return sum(not layer.reason for layer in self.found.layers)

    @property
    def bytes(self) -> int:
        """Bytes of the file, counted as in `ThresholdPrediction`."""
        return self.found.bytes


CANDIDATE_COLUMNS: Mapping[str, Callable[[ScoredQuantization], object]] = {
    "threshold": lambda candidate: candidate.threshold,
    "quantized layers": lambda candidate: candidate.layers,
    "file bytes": lambda candidate: candidate.bytes,
    "score": lambda candidate: f"{candidate.score:g}",
    "drop": lambda candidate: f"{candidate.drop:g}",
    "within max_drop": lambda candidate: "yes" if candidate.is_within else "no",
}


@dataclass(repr=False)
class AccuracySearch(HasTables):
    """Bisects the thresholds at which one more layer is quantized, for a score that drops by at most ``max_drop``.

    If layers have several bit widths to choose from, the thresholds are those at which a layer can take its narrowest
    or its widest. Scores need not fall with each layer: the best candidate has the fewest bytes within
    ``max_drop``.

    Raises:
        ModelError: ``max_drop`` is not a finite number of at least 0.
    """

    max_drop: float
    baseline: float = math.nan
    """Score of the float model."""
    candidates: list[ScoredQuantization] = field(default_factory=list[ScoredQuantization])
    """The scored quantizations, in order."""
    reason: str = ""
    """Reason not to quantize more, once it is done; empty if no threshold would."""
    is_done: bool = False
    """Whether the search finished without an interrupt."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.max_drop, int | float) and not isinstance(self.max_drop, bool)
        if not is_number or not 0 <= self.max_drop < math.inf:
            raise ModelError(
                f"max_drop is {self.max_drop!r}. It must be a number of at least 0: the largest allowed drop of the "
                "score."
            )

    @property
    def best(self) -> ScoredQuantization | None:
        """The candidate within ``max_drop`` that has the fewest bytes; None if only the float model is within it."""
        return min((t for t in self.candidates if t.is_within), key=lambda t: t.bytes, default=None)

    def settings(self, chosen: QuantizationSettings) -> QuantizationSettings:
        """Return settings to quantize as much for other targets: with the threshold of the best candidate.

        The threshold is 0, which quantizes nothing, if only the float model is within ``max_drop``.
        """
        threshold = min(self.best.threshold, MAX_THRESHOLD) if self.best is not None else 0.0
        return chosen.with_threshold(threshold)

    def run(
        self, decided: Callable[[float], Quantization], score: Callable[[Quantization | None], float]
    ) -> AccuracySearch:
        """Run the search; after an error, the candidates so far are kept.

        Args:
            decided: returns the quantization at a threshold.
            score: evaluates a quantization, or the float model for None; higher is better.

        Raises:
            ModelError: a score is not a finite number.
        """
        self.baseline = _check_finite(score(None))
        whole = decided(MAX_THRESHOLD)
        if whole.what_if and not self._try(math.inf, whole, score):
            finest = decided(0.0)  # rejects all widths, so that each layer reaches its widest one
            thresholds = sorted({row.threshold for row in (*whole.what_if, *finest.what_if)})
            within, above = -1, len(thresholds) - 1  # the last threshold equals the whole
            while above - within > 1:
                middle = (within + above) // 2
                threshold = thresholds[middle]
                if self._try(threshold, decided(threshold), score):
                    within = middle
                else:
                    above = middle
        self.reason = self._stop_reason(whole)
        self.is_done = True
        return self

    def _try(self, threshold: float, found: Quantization, score: Callable[[Quantization | None], float]) -> bool:
        reached = _check_finite(score(found))
        drop = self.baseline - reached
        self.candidates.append(ScoredQuantization(threshold, found, reached, drop, drop <= self.max_drop))
        return drop <= self.max_drop

    def _stop_reason(self, whole: Quantization) -> str:
        failed = [candidate for candidate in self.candidates if not candidate.is_within]
        if not whole.what_if:
            return "no layer can be quantized: see the summary for the reasons"
        if not failed:
            names = ", ".join(whole.kept_in_float)
            return (
                f"mixed_precision keeps {names} in float. Set mixed_precision='off' to quantize them" if names else ""
            )
        smallest = max(failed, key=lambda candidate: candidate.bytes)
        last = max((x for x in smallest.found.layers if not x.reason), key=lambda x: x.sensitivity or 0.0, default=None)
        named = f", of which {last.scope or last.name} is the most sensitive" if last else ""
        fall = f"the score drops by {smallest.drop:g}, more than max_drop={self.max_drop:g}"
        advice = ". Allow more, or train the model further" if self.best is None else ""
        return f"with {format_count(smallest.layers, 'quantized layer')}{named}, {fall}{advice}"

    @property
    def table(self) -> Table[ScoredQuantization]:
        """The candidates, in order."""
        return Table(self.candidates, CANDIDATE_COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a summary line below it."""
        return self.table, self.summarize()

    def summarize(self) -> str:
        """Return the result and the reason not to quantize more, in one line."""
        best, outcome = self.best, "the model stays in float"
        if best is not None:
            outcome = f"{format_count(best.layers, 'quantized layer')}, the score drops by {best.drop:g}"
        why = f"; {self.reason}" if self.reason else ""
        return f"{outcome}, after {format_count(len(self.candidates) + 1, 'evaluation')}{why}"


def _check_finite(score: object) -> float:
    try:
        found = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise ModelError(
            f"eval_fn returned {score!r}. It must take the module and return a finite number, higher for better models."
        )
    return found
