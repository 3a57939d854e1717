"""What ONNX Runtime computes in integers on a CPU, and in which: its QDQ selectors, as data.

Sources: onnxruntime 1.31, ``qdq_selectors.cc`` and ``qdq_selector_action_transformer.cc``; its documentation of
quantization; each entry is tried in ``tests/test_scheme.py``.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from clika_ref.quantization_scheme import Integers, QuantizationScheme

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})

X86 = QuantizationScheme(
    activations=Integers(),
    weights=Integers(is_signed=True, is_symmetric=True, is_narrow=True),
    layers=CONVOLUTIONS | {"linear", "matmul"},
    closed=CONVOLUTIONS,
    absorbed={"relu": {}, "relu6": {}, "hardtanh": {"min_val": 0}},
    elementwise=frozenset({"add", "mul", "cat", "sigmoid", "leaky_relu", "avg_pool2d", "adaptive_avg_pool2d"}),
    moving=frozenset({"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "expand", "max_pool2d"}),
    has_integer_bias=True,
)
"""Unsigned activations times signed weights, of which the instructions for it (VNNI) make sums of 32 bits."""

X86_WITHOUT_VNNI = replace(X86, weights=replace(X86.weights, bits=7))
"""Older instructions add pairs of products in 16 bits, which overflow: weights of 7 bits never do."""

ARM = replace(X86, activations=Integers(is_signed=True))

WIDE_SUMS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Flags of the processor, as Linux calls them."""


def scheme_of(machine: str, flags: frozenset[str]) -> QuantizationScheme:
    """Return what is right on a processor."""
    if machine.lower() in ("arm64", "aarch64"):
        return ARM
    return X86 if flags & WIDE_SUMS else X86_WITHOUT_VNNI


def scheme_here() -> QuantizationScheme:
    """Return what is right on this processor; where its flags cannot be read, what never overflows."""
    return scheme_of(platform.machine(), _flags())


def _flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
