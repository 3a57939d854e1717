"""Tensors of PyTorch as values of ONNX Runtime, without copies."""

from __future__ import annotations

from typing import Any

import torch


def to_onnxruntime(tensor: torch.Tensor) -> Any:
    """Convert a tensor to ONNX Runtime. NumPy lacks bfloat16, which is passed as bytes with its ONNX type."""
    from onnxruntime import OrtValue  # noqa: PLC0415 - heavy, and the plugin must load without it

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(plain.view(torch.int16).numpy(), 16)
    return OrtValue.ortvalue_from_numpy(plain.numpy())


def from_onnxruntime(value: Any) -> torch.Tensor:
    """Return a result as a tensor that shares its memory. ONNX Runtime passes booleans as integers."""
    shared = torch.from_dlpack(value)
    return shared.view(torch.bool) if value.data_type() == "tensor(bool)" else shared
