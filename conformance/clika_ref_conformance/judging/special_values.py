"""What one output may be: for each element the exact value, how far from it is right, and which special values are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from clika_ref_conformance.judging.bounds import Products
from clika_ref_conformance.judging.rounding import ulp_of

EAGER_ULPS = 8
"""How far from eager a target may lie where eager itself is all that there is to hold it against."""


@dataclass
class Expected:
    """One output as it should be: by eager, by exact arithmetic, and by runs with errors drawn at random."""

    eager: torch.Tensor
    exact: torch.Tensor
    """In float64, or an integer or bool as ``eager`` is."""
    bound: torch.Tensor | None
    """None for integers; zero where nothing may differ."""
    runs: Sequence[torch.Tensor] = ()
    same: bool = False
    """Whether nothing on the way rounds, so that every element must be eager's."""
    products: Products | None = None
    label: str = ""
    """What decided on the bound."""
    jumps: torch.Tensor | None = None
    """How far from a run the result may lie where it steps from one value to another; NaN elsewhere."""
    random: bool = field(default=False, kw_only=True)

    @cached_property
    def ambiguous(self) -> torch.Tensor:
        """Where rounding decides the integer, or whether an element is special: more than one answer is right."""
        if self.same or not self.runs:
            return torch.zeros(self.eager.shape, dtype=torch.bool)
        if self.bound is None:
            return self._low != self._high
        mixed = torch.zeros(self.eager.shape, dtype=torch.bool) if self.jumps is None else self.jumps >= 0
        for run in self.runs:
            mixed |= special_class(run) != special_class(self.exact)
        return mixed

    @cached_property
    def unstable(self) -> torch.Tensor:
        """Where eager itself leaves the bound."""
        return ~self._within(self.eager)

    def accepts(self, actual: torch.Tensor) -> torch.Tensor:
        """Return for every element whether it is right: within the bound, or, where eager is not, as eager is."""
        right = self._within(actual)
        return right | (self.unstable & self._like_eager(actual)) if bool(self.unstable.any()) else right

    def is_plainly(self, actual: torch.Tensor) -> bool:
        """Whether a result is right in every element, and eager too, and nowhere a matter of which way one rounds."""
        if self.random:
            return True
        settled = not bool(self.ambiguous.any()) and not bool(self.unstable.any())
        return settled and bool(self._within(actual).all())

    def error(self, actual: torch.Tensor) -> torch.Tensor:
        """Return ``|T - R|`` in float64, infinite where only one is finite; against eager where it is unstable."""
        centre = self.eager if self.same else torch.where(self.unstable, self.eager.double(), self.exact.double())
        actual = actual.double()
        alike = (actual == centre) | (actual.isnan() & centre.isnan())
        return torch.where(alike, 0.0, (actual - centre.double()).abs().nan_to_num(math.inf, math.inf))

    def allowed(self) -> torch.Tensor:
        """Return the bound of every element, zero for integers."""
        return torch.zeros(self.eager.shape, dtype=torch.float64) if self.bound is None else self.bound

    @cached_property
    def _low(self) -> torch.Tensor:
        return torch.stack([self.exact.long(), *(r.long() for r in self.runs)]).amin(0)

    @cached_property
    def _high(self) -> torch.Tensor:
        return torch.stack([self.exact.long(), *(r.long() for r in self.runs)]).amax(0)

    def _within(self, actual: torch.Tensor) -> torch.Tensor:
        if self.same:
            return equal(actual, self.eager)
        if self.bound is None:
            return (actual.long() >= self._low) & (actual.long() <= self._high)
        return self._near(actual.double(), self.bound)

    def _near(self, actual: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Apply the bound, with the special values that the exact value, or a run, or overflow allows."""
        largest = torch.finfo(self.eager.dtype).max
        near = (actual - self.exact).abs() <= bound
        near |= equal(actual, self.exact)
        near |= (actual == math.inf) & (self.exact + bound > largest)
        near |= (actual == -math.inf) & (self.exact - bound < -largest)
        near |= bound == math.inf
        if bool(self.ambiguous.any()):
            for run in self.runs:
                infinite = (run.abs() > largest) | (run.isfinite() & self.exact.isinf())  # beside a pole: which side?
                special = torch.where(infinite, torch.full_like(run, math.inf).copysign(run), run)
                near |= equal(actual, special) & ~special.isfinite()
                near |= False if self.jumps is None else (actual - run).abs() <= self.jumps
            near |= self.ambiguous & actual.isfinite() & ~self.exact.isfinite()
        return near

    def _like_eager(self, actual: torch.Tensor) -> torch.Tensor:
        alike = equal(actual, self.eager)
        if self.bound is None:
            return alike
        eager = self.eager.double()
        slack = self.bound.nan_to_num(0.0, 0.0) + EAGER_ULPS * ulp_of(eager, self.eager.dtype)
        return alike | ((actual.double() - eager).abs() <= slack)


def equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where two tensors agree, NaN with NaN and -0 with 0."""
    same = a == b
    return same | (a.isnan() & b.isnan()) if a.is_floating_point() else same


def special_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return 0 where finite, 1 and -1 at the infinities, 2 at NaN."""
    return torch.where(tensor.isnan(), 2.0, torch.where(tensor.isinf(), tensor.sign(), 0.0))
