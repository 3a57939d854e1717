"""Float formats that a target computes in, declared as data; they determine how its results are checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from clika_ref.core.errors import TargetError

ROUNDING_KINDS = ("ulp", "dot", "norm", "softmax", "interpolation", "compose")
"""Kinds of error classes (`clika_ref.core.accuracy`) of operators that round."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A float format that is no PyTorch dtype: ``name``, ``eps``, ``smallest_normal``, ``max`` of `torch.finfo`."""

    name: str
    eps: float
    smallest_normal: float
    max: float
    has_subnormals: bool = True
    """Whether there are numbers between 0 and the smallest normal one; otherwise they are flushed to 0."""

    @property
    def step(self) -> float:
        """The distance from 0 to the next number."""
        return self.smallest_normal * self.eps if self.has_subnormals else self.smallest_normal


TF32 = FloatFormat("tf32", 2.0**-10, 2.0**-126, (2 - 2.0**-10) * 2.0**127)
"""Format in which tensor cores read a float32: all of its exponent, and 10 bits of its fraction."""


FLUSHED_FLOAT32 = FloatFormat("flushed_float32", 2.0**-23, 2.0**-126, (2 - 2.0**-23) * 2.0**127, has_subnormals=False)
"""Float32 on a processor, or in a kernel, that flushes subnormal numbers to 0."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The formats in which a target computes on tensors of ``dtype``, if they differ from it.

    A target lists them in its attribute ``arithmetic``; the first one that fits a node applies to it.
    Without one, everything is computed and accumulated in the declared dtype. Copies, selections and comparisons are
    exact in any arithmetic.

    Args:
        dtype: of the tensors.
        compute: format that operands and results are rounded to.
        accumulate: format that partial sums are rounded to.
        kinds: error classes of the operators (`ROUNDING_KINDS`); all of them if empty.

    Raises:
        TargetError: a kind is unknown, or a dtype is not floating point.
    """

    dtype: torch.dtype
    compute: torch.dtype | FloatFormat | None = None
    accumulate: torch.dtype | FloatFormat | None = None
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in ROUNDING_KINDS]
        if unknown:
            raise TargetError(
                f"{self}: unknown rounding error {', '.join(map(repr, unknown))}. Choose from "
                f"{', '.join(ROUNDING_KINDS)}."
            )
        formats = (self.dtype, self.compute, self.accumulate)
        wrong = [f for f in formats if isinstance(f, torch.dtype) and not f.is_floating_point]
        if wrong:
            raise TargetError(f"{self}: {', '.join(map(str, wrong))} does not round. Use floating-point dtypes only.")
