"""Tensors of PyTorch as those of OpenVINO, and calls of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def run_request(request: Any, feed: Mapping[str, Any], *, has_one_thread: bool) -> Any:
    """Return the results of a call.

    Raises:
        RuntimeError: the runtime fails.
    """
    if not has_one_thread:
        return request.infer(feed)
    # With one thread, `infer` of OpenVINO 2026.4 raises no errors, and returns the previous result.
    request.start_async(feed)
    request.wait()
    return request.results


def to_openvino(tensor: torch.Tensor, ov: Any) -> Any:
    """Convert a tensor to OpenVINO; bfloat16, which NumPy lacks, is passed as bytes with its type."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype != torch.bfloat16:
        return plain.numpy()
    return ov.Tensor(plain.view(torch.int16).numpy(), list(plain.shape), ov.Type.bf16)


def from_openvino(port: Any, result: Any, ov: Any) -> torch.Tensor:
    """Return a copy of the result at a port. OpenVINO reports bfloat16 data as float16."""
    copy = torch.from_numpy(result.copy())
    return copy.view(torch.bfloat16) if port.get_element_type() == ov.Type.bf16 else copy
