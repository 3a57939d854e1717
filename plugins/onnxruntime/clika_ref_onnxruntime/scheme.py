"""INT8 support of ONNX Runtime on a CPU: its QDQ selectors, as data.

Sources: onnxruntime 1.31, ``qdq_selectors.cc`` and ``qdq_selector_action_transformer.cc``; its documentation of
quantization; each entry is verified in ``tests/test_scheme.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from clika_ref.core.quantization_scheme import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
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

LEAST_LSTM_STATES = 96
"""States from which on ``DynamicQuantizeLSTM`` is faster than ``LSTM``: 128 take 0.82 of its time, 64 take 1.5."""

X86 = QuantizationScheme(
    activations=QuantizedType(),
    weights=QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True),
    layers=CONVOLUTIONS | MATRIX_PRODUCTS,
    needs_quantized_output=CONVOLUTIONS,
    fused={"relu": {}, "relu6": {}, "hardtanh": {"min_val": 0}},
    elementwise=frozenset({"add", "mul", "cat", "sigmoid", "leaky_relu", "avg_pool2d", "adaptive_avg_pool2d"}),
    data_movement=frozenset(
        {"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "expand", "max_pool2d", "upsample_nearest2d"}
    ),
    per_tensor_weights=frozenset({"matmul"}),
    int32_bias=CONVOLUTIONS | {"linear"},
    int32_bias_2d_or_static=frozenset({"linear"}),
    weights_only=WeightOnlyScheme(layers=MATRIX_PRODUCTS, lookups={"embedding": True}, rounds_inputs=True),
    dynamic={"lstm": LEAST_LSTM_STATES, "linear": 0, "matmul": 0},
)
"""Unsigned activations and signed weights, which VNNI instructions accumulate in 32 bits."""

X86_WITHOUT_VNNI = replace(X86, weights=replace(X86.weights, bits=7))
"""Older instructions add pairs of products in 16 bits, which may overflow; 7-bit weights never do."""

ARM = replace(X86, activations=QuantizedType(is_signed=True))


def scheme_of(flags: frozenset[str], *, is_arm: bool) -> QuantizationScheme:
    """Return the scheme for a processor with these flags; without any, one that never overflows."""
    if is_arm:
        return ARM
    return X86 if flags & cpu.INT32_ACCUMULATION_FLAGS else X86_WITHOUT_VNNI


def full_scheme() -> QuantizationScheme:
    """Return the scheme for this processor, with all operators that the runtime can run in INT8."""
    return scheme_of(cpu.cpu_flags(), is_arm=cpu.is_arm())


def scheme_here() -> QuantizationScheme:
    """Return the scheme for this processor, without the operators that INT8 does not make faster."""
    return without_operators(full_scheme(), find_measurement()[0].slower)


@cache
def find_measurement() -> tuple[IslandMeasurement, str]:
    """Return the measurement nearest to the runtime and the processor here, and a note if it is of others."""
    return select_measurement(ISLANDS_PATH, installed_version("onnxruntime"), cpu.cpu_class())
