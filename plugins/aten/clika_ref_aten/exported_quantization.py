"""``quantize`` and ``dequantize`` as ``quantized_decomposed`` calls, for graphs that ``torch.export`` traces.

PyTorch's exporters support these calls. PyTorch's kernels for them multiply by the reciprocal of the scale, so nothing
else uses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.torch_internals.exported_quantization import QUANTIZED_DECOMPOSED

FOUR_BITS, ONNX_INT4, INT4_OPSET = 4, 22, 21
"""A bit width, ONNX's data type of that width (INT4), and the first opset with INT4 and block-wise scales."""


def export_quantize(
    x: Tensor,
    scale: Tensor | Number,
    zero_point: Tensor | Number,
    low: int,
    high: int,
    *,
    dtype: torch.dtype,
    axis: int | None,
) -> Tensor:
    """Quantize ``x`` like `quantize`, by a ``quantized_decomposed`` call."""
    if axis is not None:
        return QUANTIZED_DECOMPOSED.quantize_per_channel.default(x.float(), scale, zero_point, axis, low, high, dtype)
    call = _select_overload(QUANTIZED_DECOMPOSED.quantize_per_tensor, scale)
    return call(x.float(), *_match_types(scale, zero_point), low, high, dtype)


def _select_overload(overloads: Any, scale: Tensor | Number) -> Any:
    """Return the overload for a tensor or a number as the scale."""
    return overloads.tensor if isinstance(scale, Tensor) else overloads.default


def export_dequantize(
    x: Tensor, scale: Tensor | Number, zero_point: Tensor | Number | None, *, dtype: torch.dtype, axis: int | None
) -> Tensor:
    """Dequantize ``x`` like `dequantize`, by a ``quantized_decomposed`` call."""
    limits = torch.iinfo(x.dtype)
    if axis is not None:
        if zero_point is None and x.dtype != torch.int32:  # runtimes fuse only layers with weight zero points
            zero_point = torch.zeros(x.shape[axis], dtype=x.dtype, device=x.device)
        found = QUANTIZED_DECOMPOSED.dequantize_per_channel.default(
            x, scale, zero_point, axis, limits.min, limits.max, x.dtype
        )
    else:
        call = _select_overload(QUANTIZED_DECOMPOSED.dequantize_per_tensor, scale)
        found = call(x, *_match_types(scale, 0 if zero_point is None else zero_point), limits.min, limits.max, x.dtype)
    return found.to(dtype)


def export_low_bit_dequantize(
    x: Tensor, scale: Tensor, *, dtype: torch.dtype, axis: int | None, block_size: int | None, bits: int
) -> Tensor:
    """Dequantize INT4 or block-wise quantized integers by ONNX's DequantizeLinear.

    PyTorch has no call for either. Its exporter rejects operators newer than the requested ``opset_version``.
    """
    kind = dtype if scale.dtype == dtype else torch.float32
    attrs: dict[str, Any] = {} if axis is None else {"axis": axis}
    scale = scale.to(kind)
    if block_size is not None:
        attrs["block_size"] = block_size
    if block_size is not None and scale.shape == (1,):  # as clika_export writes it
        scale, attrs = scale.reshape(()), {}
    if bits == FOUR_BITS:
        x = torch.onnx.ops.symbolic("Cast", (x,), {"to": ONNX_INT4}, dtype=ONNX_INT4, shape=x.shape, version=INT4_OPSET)
    found = torch.onnx.ops.symbolic(
        "DequantizeLinear", (x, scale), attrs, dtype=kind, shape=x.shape, version=INT4_OPSET
    )
    return found.to(dtype)


def _match_types(scale: Tensor | Number, zero_point: Tensor | Number) -> tuple[Any, Any]:
    """Return both as tensors, or both as scalars."""
    if isinstance(scale, Tensor):
        return scale, zero_point if isinstance(zero_point, Tensor) else torch.tensor(zero_point)
    return float(scale), int(zero_point)
