"""Expected values of one output: the exact value, the bound and the allowed special values of each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from clika_ref_conformance.judging.bounds import DotStatistics
from clika_ref_conformance.judging.rounding import ulp_of

EAGER_ULPS = 8
"""Distance from eager that is allowed where eager is the only reference."""


@dataclass
class ExpectedOutput:
    """Expected values of one output: from eager, from exact arithmetic, and from runs with random errors."""

    eager: torch.Tensor
    exact: torch.Tensor
    """In float64, or in the integer or bool dtype of ``eager``."""
    bound: torch.Tensor | None
    """None for integers; zero where nothing may differ."""
    runs: Sequence[torch.Tensor] = ()
    same: bool = False
    """Whether no operation rounds, so that every element must equal eager's."""
    dot_statistics: DotStatistics | None = None
    label: str = ""
    """Origin of the bound."""
    jumps: torch.Tensor | None = None
    """Tolerance around a run, for elements that step from one value to another; NaN elsewhere."""
    random: bool = field(default=False, kw_only=True)

    @cached_property
    def ambiguous(self) -> torch.Tensor:
        """Mask of elements with several correct answers: rounding decides the integer, or whether it is special."""
        if self.same or not self.runs:
            return torch.zeros(self.eager.shape, dtype=torch.bool)
        if self.bound is None:
            low, high = self._limits
            return low != high
        mixed = torch.zeros(self.eager.shape, dtype=torch.bool) if self.jumps is None else self.jumps >= 0
        for run in self.runs:
            mixed |= classify_special(run) != classify_special(self.exact)
        return mixed

    @cached_property
    def unstable(self) -> torch.Tensor:
        """Mask of elements where eager itself exceeds the bound."""
        return ~self._within(self.eager)

    def accepts(self, actual: torch.Tensor) -> torch.Tensor:
        """Return a mask of correct elements: within the bound or, where eager exceeds it, close to eager."""
        right = self._within(actual)
        return right | (self.unstable & self._like_eager(actual)) if bool(self.unstable.any()) else right

    def is_clearly_right(self, actual: torch.Tensor) -> bool:
        """Return whether a result and eager are correct in every element, and no element is ambiguous."""
        if self.random:
            return True
        settled = not bool(self.ambiguous.any()) and not bool(self.unstable.any())
        return settled and bool(self._within(actual).all())

    def error(self, actual: torch.Tensor) -> torch.Tensor:
        """Return ``|T - R|`` in float64, infinite if only one is finite; relative to eager where that is unstable."""
        centre = self.eager if self.same else torch.where(self.unstable, self.eager.double(), self.exact.double())
        actual = actual.double()
        alike = (actual == centre) | (actual.isnan() & centre.isnan())
        return torch.where(alike, 0.0, (actual - centre.double()).abs().nan_to_num(math.inf, math.inf))

    def element_bounds(self) -> torch.Tensor:
        """Return the bound of every element, zero for integers."""
        return torch.zeros(self.eager.shape, dtype=torch.float64) if self.bound is None else self.bound

    @cached_property
    def _limits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest integer of each element, over all runs."""
        every = torch.stack([self.exact.long(), *(run.long() for run in self.runs)])
        return every.amin(0), every.amax(0)

    def _within(self, actual: torch.Tensor) -> torch.Tensor:
        if self.same:
            return find_equal_elements(actual, self.eager)
        if self.bound is None:
            low, high = self._limits
            return (actual.long() >= low) & (actual.long() <= high)
        return self._near(actual.double(), self.bound)

    def _near(self, actual: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Apply the bound, with the special values that the exact value, a run, or overflow allows."""
        largest = torch.finfo(self.eager.dtype).max
        near = (actual - self.exact).abs() <= bound
        near |= find_equal_elements(actual, self.exact)
        near |= (actual == math.inf) & (self.exact + bound > largest)
        near |= (actual == -math.inf) & (self.exact - bound < -largest)
        near |= bound == math.inf
        if bool(self.ambiguous.any()):
            for run in self.runs:
                infinite = (run.abs() > largest) | (run.isfinite() & self.exact.isinf())  # a pole: either sign
                special = torch.where(infinite, torch.full_like(run, math.inf).copysign(run), run)
                near |= find_equal_elements(actual, special) & ~special.isfinite()
                near |= False if self.jumps is None else (actual - run).abs() <= self.jumps
            near |= self.ambiguous & actual.isfinite() & ~self.exact.isfinite()
        return near

    def _like_eager(self, actual: torch.Tensor) -> torch.Tensor:
        alike = find_equal_elements(actual, self.eager)
        if self.bound is None:
            return alike
        eager = self.eager.double()
        slack = self.bound.nan_to_num(0.0, 0.0) + EAGER_ULPS * ulp_of(eager, self.eager.dtype)
        return alike | ((actual.double() - eager).abs() <= slack)


def find_equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of equal elements, with NaN equal to NaN and -0 to 0."""
    same = a == b
    return same | (a.isnan() & b.isnan()) if a.is_floating_point() else same


def classify_special(tensor: torch.Tensor) -> torch.Tensor:
    """Return 0 for finite elements, 1 and -1 for the infinities, 2 for NaN."""
    return torch.where(tensor.isnan(), 2.0, torch.where(tensor.isinf(), tensor.sign(), 0.0))
