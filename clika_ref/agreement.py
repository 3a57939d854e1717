"""How near two models are to each other: the same inputs through both, output by output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clika_ref.comparison import difference
from clika_ref.core.errors import ModelError
from clika_ref.quantization.decision import decibels
from clika_ref.quantization.energy import energy, missed
from clika_ref.reporting.tables import table_text

COLUMNS = ("output", "elements", "largest", "largest difference", "SQNR", "same decision", "within rounding")


@dataclass
class OutputAgreement:
    """How near an output of one model is to that of another one, over all inputs."""

    name: str
    elements: int = 0
    largest: float = 0.0
    """Of the magnitudes of the first model's elements, infinite ones aside."""
    worst: float = 0.0
    """The largest difference of two elements."""
    signal: float = 0.0
    """The squares of the first model's elements, summed."""
    noise: float = 0.0
    """The squares of what the second one misses of them, summed."""
    rows: int = 0
    """How many decisions there are: places of the largest element along the last side."""
    same_rows: int = 0
    """How many of them are the same."""
    beyond_rounding: str = ""
    """How they differ on the first input where they do by more than float rounding; nothing where they do not."""

    @property
    def sqnr(self) -> float:
        """The signal over the noise, in dB; infinite where there is none."""
        return decibels(self.signal, self.noise)

    @property
    def decisions(self) -> float | None:
        """The share of decisions that are the same; None of an output that decides nothing."""
        return self.same_rows / self.rows if self.rows else None

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """Count one more pair of results, of one shape.

        Args:
            wanted: what the first model returned.
            found: what the second one did.
        """
        self.beyond_rounding = self.beyond_rounding or difference(wanted, found) or ""
        w, f = wanted.detach().double(), found.detach().double()
        self.elements += w.numel()
        if not w.numel():
            return
        self.worst = max(self.worst, _largest((w - f).abs()))
        self.largest = max(self.largest, _largest(w.abs()))
        self.signal, self.noise = self.signal + energy(w), self.noise + missed(f, w)
        if wanted.is_floating_point() and w.ndim and w.shape[-1] > 1:
            self.rows += w.numel() // w.shape[-1]
            self.same_rows += int((w.argmax(-1) == f.argmax(-1)).sum())


@dataclass
class Agreement:
    """How near two models are; printed, a table."""

    inputs: int = 0
    """How many calls were made of each."""
    outputs: list[OutputAgreement] = field(default_factory=list[OutputAgreement])

    @property
    def is_within_rounding(self) -> bool:
        """Whether no output differs by more than float rounding."""
        return not any(output.beyond_rounding for output in self.outputs)

    @property
    def sqnr(self) -> float:
        """The least of all outputs, in dB."""
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
        return table_text(COLUMNS, rows)


def agreement_of(
    wanted: Callable[[Any], Sequence[Tensor]],
    found: Callable[[Any], Sequence[Tensor]],
    calls: Iterable[Any],
    names: Sequence[str] = (),
) -> Agreement:
    """Run two models on the same inputs, and return how near the second is to the first.

    Args:
        wanted: runs the first on one element of ``calls``.
        found: runs the second.
        calls: inputs, one element for each call.
        names: of outputs; those that have none are numbered.

    Raises:
        ModelError: the models return different numbers of tensors, or tensors of different shapes; or there is no call.
    """
    told = Agreement()
    for call in calls:
        pairs = _paired(wanted(call), found(call))
        if not told.outputs:
            told.outputs = [OutputAgreement(names[i] if i < len(names) else str(i)) for i in range(len(pairs))]
        for output, pair in zip(told.outputs, pairs, strict=True):
            output.add(*pair)
        told.inputs += 1
    if not told.inputs:
        msg = "there are no inputs to compare on; give at least one call"
        raise ModelError(msg)
    return told


def _paired(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(wanted) != len(found):
        msg = f"the first returns {len(wanted)} tensors and the second {len(found)}; compare what returns the same"
        raise ModelError(msg)
    for number, (w, f) in enumerate(zip(wanted, found, strict=True)):
        if w.shape != f.shape:
            msg = f"output {number} is of shape {list(w.shape)} in the first and {list(f.shape)} in the second"
            raise ModelError(msg)
    return list(zip(wanted, found, strict=True))


def _largest(magnitudes: Tensor) -> float:
    """Return the largest of them that is finite."""
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
