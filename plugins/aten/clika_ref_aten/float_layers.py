"""Quantization traits of matrix products that stay in float on every target: layers, which reports list, and others."""

from __future__ import annotations

from clika_ref.core.traits import QuantizationTrait

FLOAT_PRODUCT = QuantizationTrait("float-layer")
"""Trait of an operator that multiplies activations with each other, in float."""


def float_layer(*, matrices: int, axis: int | None = None) -> QuantizationTrait:
    """Return the trait of a layer that is computed in float; its weights start at operand ``matrices``."""
    return QuantizationTrait("float-layer", axis=axis, matrices=matrices)
