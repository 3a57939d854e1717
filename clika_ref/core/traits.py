"""How quantization passes through an operator: a claim of the declaration that the conformance suite tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizationTrait:
    """One of the five ways in which quantized values pass through an operator.

    ``weight``, ``axis``, ``bias`` and ``channel`` are set for computing operators only: the positions of weight and
    bias among the operands, and the side of output channels, of the weight and of the result.
    """

    kind: str
    weight: int | None = None
    axis: int | None = None
    bias: int | None = None
    channel: int | None = None

    def __str__(self) -> str:
        return self.kind


KEEP_FLOAT = QuantizationTrait("keep-float")
"""Computed in float; quantizing its result gains nothing (the default)."""

OWN_SCALE = QuantizationTrait("own-scale")
"""The result has a range of its own: it needs a scale of its own where it is quantized."""

SAME_SCALE = QuantizationTrait("same-scale")
"""Moves or selects elements: the result has the scale of the first operand."""

SHARED_SCALE = QuantizationTrait("shared-scale")
"""Joins operands: all of them and the result share one scale."""


def compute(*, weight: int = 1, axis: int = 0, bias: int | None = None, channel: int = -1) -> QuantizationTrait:
    """Trait of an operator that multiplies and accumulates, which is where integers save time."""
    return QuantizationTrait("compute", weight, axis, bias, channel)
