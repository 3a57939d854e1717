"""The trait of layers that no target runs in integers, as recurrent networks: reports name them all the same."""

from __future__ import annotations

from clika_ref.core.traits import QuantizationTrait


def float_layer(*, matrices: int) -> QuantizationTrait:
    """Trait of an operator that multiplies by weights, which stand from a position on, and is computed in float."""
    return QuantizationTrait("float-layer", matrices=matrices)
