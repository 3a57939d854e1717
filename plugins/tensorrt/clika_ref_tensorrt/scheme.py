"""INT8 and INT4 support of TensorRT, as data.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11). No TensorRT was run: the
scheme follows its documentation, and `clika_ref_tensorrt.rules` checks files by the same.
"""

from __future__ import annotations

from dataclasses import replace

from clika_ref.quantization_scheme import (
    CONVOLUTIONS,
    PRODUCTS,
    TRANSPOSED,
    Integers,
    QuantizationScheme,
    Sums,
    WeightsOnly,
)

SIGNED = Integers(is_signed=True, is_symmetric=True)

EXPLICIT = QuantizationScheme(
    activations=SIGNED,
    weights=SIGNED,
    layers=CONVOLUTIONS | TRANSPOSED | PRODUCTS,
    moving=frozenset({"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "max_pool2d"}),
    sums=Sums(CONVOLUTIONS, of_two_rounded=False),
    joined=frozenset({"cat"}),
    one_scale=TRANSPOSED,
    is_all_or_none=True,
    weights_only=WeightsOnly(layers=PRODUCTS, bits=frozenset({4}), blocks={4: frozenset({64, 128})}),
)
"""Quantize only the inputs of layers; for a residual, only the operand that is added to a convolution's result."""

OF_WEIGHTS = replace(EXPLICIT, weights_only=WeightsOnly(layers=PRODUCTS, is_default=True))
"""TensorRT-LLM also supports 8-bit weight-only quantization, and quantizes only weights by default."""
