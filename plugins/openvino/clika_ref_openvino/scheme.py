"""INT8 support of OpenVINO on a CPU: its low precision transformations, as data.

Sources: openvino 2026.4, ``layer_transformation.cpp``, ``transformation_pipeline.cpp`` of its CPU plugin, its guide to
low precision transformations; each entry is verified in ``tests/test_scheme.py``.
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
"""The output of a layer needs no quantization itself: the next layer quantizes it, and operators in between are fused.

Residuals are added by the preceding convolution if both operands are quantized, otherwise by a float kernel.
"""


def without_overflow(scheme: QuantizationScheme, flags: frozenset[str], *, is_arm: bool) -> QuantizationScheme:
    """Return a scheme for a processor with these flags: without VNNI, sums of 16 bits require 7-bit weights."""
    return scheme if is_arm or flags & processor.WIDE_SUMS else replace(scheme, weights=replace(scheme.weights, bits=7))


def symmetric(scheme: QuantizationScheme) -> QuantizationScheme:
    """Return the scheme of OpenVINO's performance preset: symmetric activations, with no zero points to compensate."""
    return replace(scheme, activations=replace(scheme.activations, is_symmetric=True))


def scheme_here() -> QuantizationScheme:
    """Return the scheme for this processor."""
    return without_overflow(MIXED, processor.flags(), is_arm=processor.is_arm())
