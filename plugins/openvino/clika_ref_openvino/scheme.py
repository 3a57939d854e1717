"""INT8 support of OpenVINO on a CPU: its low precision transformations, as data.

Sources: openvino 2026.4, ``layer_transformation.cpp``, ``transformation_pipeline.cpp`` of its CPU plugin, its guide to
low precision transformations; each entry is verified in ``tests/test_scheme.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

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
from clika_ref.targets.island_table import (
    IslandMeasurement,
    installed_version,
    select_measurement,
    without_operators,
)

ISLANDS_PATH = Path(__file__).with_name("islands.toml")
"""The measured times of operators between layers."""

ISLAND_OPERATORS = frozenset({"cat", "upsample_nearest2d"})
"""Operators between layers that run in INT8 or in float, whichever is faster.

Max poolings are not among them: in chains of convolutions they are up to 1.2x slower in INT8, but resnet18 is 1.04x
faster.
"""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Layers whose weights are dequantized when a file is loaded."""

MIXED_SCHEME = QuantizationScheme(
    activations=QuantizedType(),
    weights=QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True),
    layers=CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | MATRIX_PRODUCTS,
    data_movement=frozenset(
        {"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "max_pool2d", "upsample_nearest2d"}
    ),
    shared_qparams=frozenset({"cat"}),
    quantizes_before_moves=True,
    fused_sums=FusedSums(CONVOLUTIONS, rounds_layer_result=True),
    needs_zero_point_0=TRANSPOSED_CONVOLUTIONS,
    needs_single_group=TRANSPOSED_CONVOLUTIONS,
    # OpenVINO 2026.4 computes wrong results for 4-bit rows of odd length.
    weights_only=WeightOnlyScheme(layers=MATRIX_PRODUCTS, lookups={"embedding": False}, needs_whole_bytes=True),
    dynamic=dict.fromkeys(RECURRENT),
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


def round_inputs(scheme: QuantizationScheme, group_size: int) -> QuantizationScheme:
    """Return a scheme for files whose runtime rounds the inputs of layers with low-bit weights to 8 bits.

    Args:
        scheme: the scheme for other files.
        group_size: number of neighbors in an input that share a scale.
    """
    if scheme.weights_only is None:
        return scheme
    return replace(scheme, weights_only=replace(scheme.weights_only, rounds_inputs=True, block_size=group_size))


def full_scheme() -> QuantizationScheme:
    """Return the scheme for this processor, with all operators that the runtime can run in INT8."""
    return avoid_overflow(MIXED_SCHEME, cpu.cpu_flags(), is_arm=cpu.is_arm())


def scheme_here() -> QuantizationScheme:
    """Return the scheme for this processor, without the operators that INT8 does not make faster."""
    return keep_islands_in_float(find_measurement()[0].slower)


def keep_islands_in_float(in_float: frozenset[str]) -> QuantizationScheme:
    """Return the scheme for this processor, with operators between layers in float."""
    return without_operators(full_scheme(), in_float & ISLAND_OPERATORS)


@cache
def find_measurement() -> tuple[IslandMeasurement, str]:
    """Return the measurement nearest to the runtime and the processor here, and a note if it is of others."""
    return select_measurement(ISLANDS_PATH, installed_version("openvino"), cpu.cpu_class())
