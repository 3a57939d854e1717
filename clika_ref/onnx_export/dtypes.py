"""The ONNX element type of each torch dtype, and the inverse."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from clika_ref.core.errors import ModelError

TO_ONNX: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.uint16: ir.DataType.UINT16,
    torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
    torch.bool: ir.DataType.BOOL,
    torch.complex64: ir.DataType.COMPLEX64,
    torch.complex128: ir.DataType.COMPLEX128,
}

TO_TORCH: dict[ir.DataType, torch.dtype] = {onnx: dtype for dtype, onnx in TO_ONNX.items()}


def to_onnx(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX element type of a dtype.

    Raises:
        ModelError: ONNX has none.
    """
    if dtype not in TO_ONNX:
        raise ModelError(f"ONNX has no element type for {dtype}. Cast to one of {', '.join(str(d) for d in TO_ONNX)}.")
    return TO_ONNX[dtype]


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor's elements in order, of shape ``[bytes]``; copied only if not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # one element is contiguous with any stride, but view() needs stride 1
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
