"""Quantization traits: how quantization passes through an operator. The conformance suite tests each declared trait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizationTrait:
    """How quantized values pass through an operator.

    Computing operators set ``weight`` and ``bias``, the positions of these operands; ``axis``, the output channel axis
    of the weight; and ``channel``, the output channel axis of the result.

    ``factors`` are the positions of vector operands that scale the result along its last dim. ``is_homogeneous`` means
    that multiplying an element of the first operand by a positive factor multiplies the result by it.

    ``matrices`` is set for layers that always stay in float: constant operands from this position on are weights if
    they have several dims. With an ``axis`` below 0, such a weight stacks several matrices, and each vector is
    multiplied by only one of them.
    """

    kind: str
    """The name of the trait."""
    weight: int | None = None
    axis: int | None = None
    bias: int | None = None
    channel: int | None = None
    factors: tuple[int, ...] = ()
    is_homogeneous: bool = False
    matrices: int | None = None


KEEP_FLOAT = QuantizationTrait("keep-float")
"""Computed in float; quantizing the result brings no benefit (the default)."""

OWN_QPARAMS = QuantizationTrait("own-qparams")
"""The result has its own range, and its own qparams if it is quantized."""

HOMOGENEOUS_OWN_QPARAMS = QuantizationTrait("own-qparams", is_homogeneous=True)
"""Own qparams, and positive factors pass through: doubling an element doubles the result."""

SHARED_QPARAMS = QuantizationTrait("shared-qparams")
"""Moves or selects elements: the result shares the qparams of the first operand."""

LOOKUP = QuantizationTrait("lookup", weight=0, axis=0)
"""Selects rows of a table, its weight: each row may have its own scale, and only selected rows are dequantized."""

UNIFIED_QPARAMS = QuantizationTrait("unified-qparams")
"""Joins operands: all of them and the result share the same qparams."""


def own_qparams_scaled_by(*factors: int) -> QuantizationTrait:
    """Return the trait of an operator with its own range, scaled along the last dim by the operands ``factors``."""
    return QuantizationTrait("own-qparams", factors=factors)


def compute_trait(*, weight: int = 1, axis: int = 0, bias: int | None = None, channel: int = -1) -> QuantizationTrait:
    """Return the trait of an operator that multiplies and accumulates, such as a linear layer: INT8 makes these faster.

    Args:
        weight: the position of the weight among the operands.
        axis: the output channel axis of the weight.
        bias: the position of the bias; None if there is none.
        channel: the output channel axis of the result.
    """
    return QuantizationTrait("compute", weight, axis, bias, channel)
