"""The traits of what multiplies in float whatever the target: layers, which reports name, and computed values."""

from __future__ import annotations

from clika_ref.core.traits import QuantizationTrait

FLOAT_PRODUCT = QuantizationTrait("float-layer")
"""Trait of an operator that multiplies computed values with one another, in float."""


def float_layer(*, matrices: int, axis: int | None = None) -> QuantizationTrait:
    """Trait of an operator that multiplies by weights, which stand from a position on, and is computed in float."""
    return QuantizationTrait("float-layer", axis=axis, matrices=matrices)
