"""Compare two models: run the same inputs through both and measure the difference of each output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clika_ref.core.comparison import describe_difference
from clika_ref.core.errors import ModelError, format_count
from clika_ref.quantization.algorithms.sqnr import sum_squared_error, sum_squares
from clika_ref.quantization.decision import ratio_in_decibels
from clika_ref.reporting.tables import render_text_table

AGREEMENT_COLUMNS = ("output", "elements", "largest", "largest difference", "SQNR", "same decision", "within rounding")


@dataclass
class OutputAgreement:
    """How closely an output of one model matches that of another, over all inputs."""

    name: str
    elements: int = 0
    largest: float = 0.0
    """Largest finite magnitude among the elements of the first model."""
    worst: float = 0.0
    """The largest difference of two elements."""
    signal: float = 0.0
    """Sum of squares of the first model's elements."""
    noise: float = 0.0
    """Sum of squares of the difference to the second model."""
    rows: int = 0
    """Number of decisions: argmax results along the last dim."""
    same_rows: int = 0
    """Number of decisions on which both models agree."""
    beyond_rounding: str = ""
    """Description of the first difference beyond float rounding; empty if there is none."""

    @property
    def sqnr(self) -> float:
        """Signal-to-noise ratio in dB; infinite without noise."""
        return ratio_in_decibels(self.signal, self.noise)

    @property
    def decisions(self) -> float | None:
        """Fraction of equal decisions; None for an output without decisions."""
        return self.same_rows / self.rows if self.rows else None

    def add(self, reference: Tensor, found: Tensor) -> None:
        """Add one more pair of results of the same shape.

        Args:
            reference: the output of the first model.
            found: the output of the second model.
        """
        self.beyond_rounding = self.beyond_rounding or describe_difference(reference, found) or ""
        w, f = reference.detach().double(), found.detach().double()
        self.elements += w.numel()
        if not w.numel():
            return
        self.worst = max(self.worst, _largest_finite((w - f).abs()))
        self.largest = max(self.largest, _largest_finite(w.abs()))
        self.signal, self.noise = self.signal + sum_squares(w), self.noise + sum_squared_error(f, w)
        if reference.is_floating_point() and w.ndim and w.shape[-1] > 1:
            self.rows += w.numel() // w.shape[-1]
            self.same_rows += int((w.argmax(-1) == f.argmax(-1)).sum())


@dataclass
class Agreement:
    """How closely two models match; prints as a table."""

    inputs: int = 0
    """Number of calls of each model."""
    outputs: list[OutputAgreement] = field(default_factory=list[OutputAgreement])
    """The result for each output."""

    @property
    def is_within_rounding(self) -> bool:
        """Whether no output differs by more than float rounding."""
        return not any(output.beyond_rounding for output in self.outputs)

    @property
    def sqnr(self) -> float:
        """The lowest SQNR over all outputs, in dB."""
        return min((output.sqnr for output in self.outputs), default=math.inf)

    def __str__(self) -> str:
        rows = [
            (
                output.name,
                output.elements,
                output.largest,
                output.worst,
                "equal" if output.sqnr == math.inf else f"{output.sqnr:.1f} dB",
                "" if output.decisions is None else f"{output.decisions:.2%}",
                output.beyond_rounding or "yes",
            )
            for output in self.outputs
        ]
        return render_text_table(AGREEMENT_COLUMNS, rows)


def measure_agreement(
    reference: Callable[[Any], Sequence[Tensor]],
    found: Callable[[Any], Sequence[Tensor]],
    calls: Iterable[Any],
    names: Sequence[str] = (),
) -> Agreement:
    """Run two models on the same inputs and return how closely the second matches the first.

    Args:
        reference: runs the first model on one element of ``calls``.
        found: runs the second model.
        calls: inputs, one element per call.
        names: names of the outputs; outputs without one are numbered.

    Raises:
        ModelError: the models return different numbers of tensors, or tensors of different shapes; or there is no call.
    """
    agreement = Agreement()
    for call in calls:
        pairs = _pair_outputs(reference(call), found(call))
        if not agreement.outputs:
            agreement.outputs = [OutputAgreement(names[i] if i < len(names) else str(i)) for i in range(len(pairs))]
        for output, pair in zip(agreement.outputs, pairs, strict=True):
            output.add(*pair)
        agreement.inputs += 1
    if not agreement.inputs:
        raise ModelError("cannot compare the models: there are no inputs. Pass at least one call.")
    return agreement


def _pair_outputs(reference: Sequence[Tensor], found: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(reference) != len(found):
        raise ModelError(
            f"cannot compare the models: the first returns {format_count(len(reference), 'tensor')}, the second "
            f"{len(found)}. Compare models with the same outputs."
        )
    for number, (w, f) in enumerate(zip(reference, found, strict=True)):
        if w.shape != f.shape:
            raise ModelError(
                f"cannot compare the models: output {number} has the shape {list(w.shape)} in the first, and "
                f"{list(f.shape)} in the second. Compare models with the same outputs."
            )
    return list(zip(reference, found, strict=True))


def _largest_finite(magnitudes: Tensor) -> float:
    """Return the largest finite value, 0.0 if there is none."""
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
