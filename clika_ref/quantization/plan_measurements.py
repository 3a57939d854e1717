"""Measurements of plans on data: each plan is measured once, with and without bias correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from clika_ref.core.operators import Operator
from clika_ref.quantization.algorithms.bias_correction import BiasShifts
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation
from clika_ref.quantization.calibration.calibrator import Calibration, take_batches
from clika_ref.quantization.qdq.insertion import Plan

MIN_SAMPLES_TO_CORRECT, MAX_SAMPLES_TO_CORRECT = 4, 16
"""Samples that bias corrections are fitted to before they are evaluated, and if they help.

The shift of one sample is mostly noise, and further samples change little.
"""


@dataclass
class PlanMeasurements:
    """Measures the plans of one graph.

    The observer search, the choice of layers and bias correction ask for the same plans. They are known by identity,
    and must not be changed after they were measured.
    """

    calibration: Calibration
    """Calibration of the graph; bias corrections are fitted to its kept batches."""
    evaluation: CandidateEvaluation
    """Held-out data."""
    operators: Mapping[str, Operator]
    """The operators of the registry."""
    _errors: dict[int, tuple[Plan, float]] = field(default_factory=dict[int, tuple[Plan, float]], repr=False)
    _corrected: dict[int, tuple[Plan, Plan, BiasShifts]] = field(
        default_factory=dict[int, tuple[Plan, Plan, BiasShifts]], repr=False
    )

    def measure_error(self, plan: Plan) -> float:
        """Return the error of a plan on held-out data (`CandidateEvaluation.error`)."""
        if id(plan) not in self._errors:
            self._errors[id(plan)] = plan, self.evaluation.error(plan)
        return self._errors[id(plan)][1]

    def correct_biases(self, plan: Plan) -> Plan:
        """Return a plan with bias corrections that are fitted to few samples."""
        if id(plan) not in self._corrected:
            shifts = BiasShifts(self.calibration.graph, plan, self.operators)
            self._add_batches(shifts, self._find_batches(MIN_SAMPLES_TO_CORRECT))
            self._corrected[id(plan)] = plan, replace(plan, corrections=shifts.corrections()), shifts.copy()
        return self._corrected[id(plan)][1]

    def correct_biases_further(self, plan: Plan) -> Plan:
        """Return a plan with bias corrections that are fitted to more samples; the same if there are none."""
        first = self.correct_biases(plan)
        more = self._find_batches(MAX_SAMPLES_TO_CORRECT)[len(self._find_batches(MIN_SAMPLES_TO_CORRECT)) :]
        if not more:
            return first
        shifts = self._corrected[id(plan)][2].copy()
        self._add_batches(shifts, more)
        return replace(plan, corrections=shifts.corrections())

    def _find_batches(self, min_samples: int) -> list[int]:
        """Return the indices of the first batches for fitting with this many samples, or of all."""
        kept = self.calibration.reservoir
        samples = take_batches((kept.batches[number] for number in kept.fitted_indices), min_samples)
        return kept.fitted_indices[: len(samples)]

    def _add_batches(self, shifts: BiasShifts, batches: Sequence[int]) -> None:
        """Measure the shifts that bias correction removes on kept batches."""
        for number in batches:
            shifts.add(self.calibration.reservoir.batches[number], self.calibration.batch_means(number))
