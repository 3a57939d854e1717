"""INT8 and INT4 support of TensorRT, as data.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11). No TensorRT was run: the
scheme follows its documentation, and `clika_ref_tensorrt.rules` checks files by the same.
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

SIGNED_SYMMETRIC = QuantizedType(is_signed=True, is_symmetric=True)

EXPLICIT_SCHEME = QuantizationScheme(
    activations=SIGNED_SYMMETRIC,
    weights=SIGNED_SYMMETRIC,
    layers=CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | MATRIX_PRODUCTS,
    data_movement=frozenset({"reshape", "permute", "squeeze", "unsqueeze", "slice", "select", "max_pool2d"}),
    fused_sums=FusedSums(CONVOLUTIONS, rounds_layer_result=False),
    shared_qparams=frozenset({"cat"}),
    per_tensor_weights=TRANSPOSED_CONVOLUTIONS,
    is_all_or_none_quantized=True,
    weights_only=WeightOnlyScheme(layers=MATRIX_PRODUCTS, bits=frozenset({4}), blocks={4: frozenset({64, 128})}),
    has_float_bodies=True,
)
"""Quantize only the inputs of layers; for a residual, only the operand that is added to a convolution's result."""

WEIGHT_ONLY_SCHEME = replace(EXPLICIT_SCHEME, weights_only=WeightOnlyScheme(layers=MATRIX_PRODUCTS, is_default=True))
"""TensorRT-LLM also supports 8-bit weight-only quantization, and quantizes only weights by default."""
