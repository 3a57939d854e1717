"""Number formats of a target's arithmetic for a node: the declared dtype, unless the target declares others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clika_ref.core.arithmetic import Arithmetic
from clika_ref_conformance.judging.rounding import AnyFormat, limits_of, ulp_of


@dataclass(frozen=True, slots=True)
class Formats:
    """Dtype of the results, and formats that operands and partial sums are rounded to."""

    dtype: torch.dtype
    compute: AnyFormat
    accumulate: AnyFormat

    @property
    def is_plain(self) -> bool:
        """Whether everything is computed in the declared dtype."""
        return self.compute is self.dtype and self.accumulate is self.dtype

    @property
    def rounds_operands(self) -> bool:
        """Whether rounding operands loses precision of their dtype."""
        return limits_of(self.compute).eps > limits_of(self.dtype).eps

    @property
    def is_as_fine(self) -> bool:
        """Whether no format is coarser than the declared dtype."""
        return not self.rounds_operands and limits_of(self.accumulate).eps <= limits_of(self.dtype).eps

    @property
    def stored(self) -> AnyFormat:
        """Format that results are rounded to."""
        return self.compute if self.rounds_operands else self.dtype

    def of(self, kind: str) -> AnyFormat:
        """Return the format with the rounding that bounds an error class with a single unit.

        An elementwise function accumulates nothing; all other classes use the coarsest format involved.
        """
        taking_part = (self.compute,) if kind == "ulp" else (self.compute, self.accumulate)
        return max(taking_part, key=lambda f: limits_of(f).eps)

    def add_ulp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``|x|`` increased by one ulp of ``compute``, infinite if that overflows."""
        larger = tensor.abs() + ulp_of(tensor, self.compute)
        return torch.where(larger > limits_of(self.compute).max, math.inf, larger)

    def add_rounding_noise(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return elements changed by up to one ulp of ``compute``, infinite if that overflows.

        One ulp instead of half, since hardware may truncate instead of round.
        """
        uniform = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        moved = tensor + uniform * ulp_of(tensor, self.compute)
        return torch.where(moved.abs() > limits_of(self.compute).max, moved.sign() * math.inf, moved)


def formats_of(dtype: torch.dtype, kind: str, declared: Sequence[Arithmetic]) -> Formats:
    """Return the formats of a node that computes in ``dtype`` and has an error class of this kind."""
    for one in declared:
        if one.dtype is dtype and (not one.kinds or kind in one.kinds):
            return Formats(dtype, one.compute or dtype, one.accumulate or dtype)
    return Formats(dtype, dtype, dtype)
