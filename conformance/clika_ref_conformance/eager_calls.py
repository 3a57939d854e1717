"""Calls of operators and modules in eager PyTorch, with the results as a list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def call_eagerly(function: Callable[..., Any], operands: Sequence[Any], attrs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of a call, computed without gradients."""
    with torch.no_grad():
        return as_list(function(*operands, **attrs))


def as_list(result: Any) -> list[torch.Tensor]:
    """Return the result of a call as a list of tensors."""
    return [result] if isinstance(result, torch.Tensor) else list(result)
