"""What OpenVINO computes in integers on a CPU, and in which: its low precision transformations, as data.

Sources: openvino 2026.4, ``layer_transformation.cpp``, ``transformation_pipeline.cpp`` of its CPU plugin, its guide to
low precision transformations; each entry is tried in ``tests/test_scheme.py``.
"""

from __future__ import annotations

from dataclasses import replace

from clika_ref import processor
from clika_ref.quantization_scheme import (
    CONVOLUTIONS,
    PRODUCTS,
    TRANSPOSED,
    Integers,
    QuantizationScheme,
    Sums,
    WeightsOnly,
)

MIXED = QuantizationScheme(
    activations=Integers(),
    weights=Integers(is_signed=True, is_symmetric=True, is_narrow=True),
    layers=CONVOLUTIONS | TRANSPOSED | PRODUCTS,
    moving=frozenset({"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "max_pool2d"}),
    moves_integers=True,
    sums=Sums(CONVOLUTIONS, of_two_rounded=True),
    from_zero=TRANSPOSED,
    undivided=TRANSPOSED,
    weights_only=WeightsOnly(layers=PRODUCTS),
)
"""What a layer returns needs no integers of its own: the next one reads them, and what lies between is computed along.

Residuals are added by the convolution before where both are integers, otherwise by a kernel in float.
"""


def without_overflow(scheme: QuantizationScheme, flags: frozenset[str], *, is_arm: bool) -> QuantizationScheme:
    """Return a scheme for a processor that can do what its flags say: of 7 bits of weights pairs of products fit 16."""
    return scheme if is_arm or flags & processor.WIDE_SUMS else replace(scheme, weights=replace(scheme.weights, bits=7))


def symmetric(scheme: QuantizationScheme) -> QuantizationScheme:
    """Return the scheme of OpenVINO's preset for performance: no layer has to make up for a zero point."""
    return replace(scheme, activations=replace(scheme.activations, is_symmetric=True))


def scheme_here() -> QuantizationScheme:
    """Return what is right on this processor."""
    return without_overflow(MIXED, processor.flags(), is_arm=processor.is_arm())
