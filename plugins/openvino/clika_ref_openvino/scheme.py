"""INT8 support of OpenVINO on a CPU: its low precision transformations, as data.

Sources: openvino 2026.4, ``layer_transformation.cpp``, ``transformation_pipeline.cpp`` of its CPU plugin, its guide to
low precision transformations; each entry is verified in ``tests/test_scheme.py``.
"""

from __future__ import annotations

from dataclasses import replace

from clika_ref.core.quantization_scheme import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    FusedSums,
    QuantizationScheme,
    QuantizedType,
    WeightOnlyScheme,
)
from clika_ref.targets import cpu

MIXED_SCHEME = QuantizationScheme(
    activations=QuantizedType(),
    weights=QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True),
    layers=CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | MATRIX_PRODUCTS,
    data_movement=frozenset({"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "max_pool2d"}),
    quantizes_before_moves=True,
    fused_sums=FusedSums(CONVOLUTIONS, rounds_layer_result=True),
    needs_zero_point_0=TRANSPOSED_CONVOLUTIONS,
    needs_single_group=TRANSPOSED_CONVOLUTIONS,
    # OpenVINO 2026.4 computes wrong results for 4-bit rows of odd length.
    weights_only=WeightOnlyScheme(layers=MATRIX_PRODUCTS, needs_whole_bytes=True),
)
"""The output of a layer needs no quantization itself: the next layer quantizes it, and operators in between are fused.

Residuals are added by the preceding convolution if both operands are quantized, otherwise by a float kernel.
"""


def avoid_overflow(scheme: QuantizationScheme, flags: frozenset[str], *, is_arm: bool) -> QuantizationScheme:
    """Return a scheme for a processor with these flags: without VNNI, sums of 16 bits require 7-bit weights."""
    return (
        scheme
        if is_arm or flags & cpu.INT32_ACCUMULATION_FLAGS
        else replace(scheme, weights=replace(scheme.weights, bits=7))
    )


def make_symmetric(scheme: QuantizationScheme) -> QuantizationScheme:
    """Return the scheme of OpenVINO's performance preset: symmetric activations, with no zero points to compensate."""
    return replace(scheme, activations=replace(scheme.activations, is_symmetric=True))


def scheme_here() -> QuantizationScheme:
    """Return the scheme for this processor."""
    return avoid_overflow(MIXED_SCHEME, cpu.cpu_flags(), is_arm=cpu.is_arm())
