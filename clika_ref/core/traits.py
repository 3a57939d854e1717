"""How quantization passes through an operator: a claim of the declaration that the conformance suite tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizationTrait:
    """One of the ways in which quantized values pass through an operator.

    ``weight``, ``axis``, ``bias`` and ``channel`` are set for computing operators only: the positions of weight and
    bias among the operands, and the side of output channels, of the weight and of the result. ``factors`` are the
    positions of vectors of which a factor is one of the result, along its last side; ``is_homogeneous`` says that a
    positive factor of an element of the first operand is one of that of the result. ``matrices`` is set for layers that
    stay float only: the position from which on constant operands with several sides are weights; where an
    ``axis`` below 0 is set for them, too, each vector meets but one of the matrices that such a weight is made of.
    """

    kind: str
    """Which way it is, in a word."""
    weight: int | None = None
    axis: int | None = None
    bias: int | None = None
    channel: int | None = None
    factors: tuple[int, ...] = ()
    is_homogeneous: bool = False
    matrices: int | None = None

    def __str__(self) -> str:
        return self.kind


KEEP_FLOAT = QuantizationTrait("keep-float")
"""Computed in float; quantizing its result gains nothing (the default)."""

OWN_SCALE = QuantizationTrait("own-scale")
"""The result has a range of its own: it needs a scale of its own where it is quantized."""

HOMOGENEOUS = QuantizationTrait("own-scale", is_homogeneous=True)
"""The same, where positive factors pass through: twice an element is twice the result."""

SAME_SCALE = QuantizationTrait("same-scale")
"""Moves or selects elements: the result has the scale of the first operand."""

SHARED_SCALE = QuantizationTrait("shared-scale")
"""Joins operands: all of them and the result share one scale."""


def scaled_by(*factors: int) -> QuantizationTrait:
    """Trait of an operator with a range of its own, whose last side is scaled by the operands at these positions."""
    return QuantizationTrait("own-scale", factors=factors)


def compute(*, weight: int = 1, axis: int = 0, bias: int | None = None, channel: int = -1) -> QuantizationTrait:
    """Trait of an operator that multiplies and accumulates, which is where integers save time.

    Args:
        weight: the position of the weight among the operands.
        axis: the side of the weight along which its output channels lie.
        bias: the position of the bias; None where there is none.
        channel: the side of the result along which output channels lie.
    """
    return QuantizationTrait("compute", weight, axis, bias, channel)
