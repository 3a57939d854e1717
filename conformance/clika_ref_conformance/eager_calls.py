"""Calls of operators and modules in eager PyTorch, with the results as a list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.symbols import resolve


def call_eagerly(function: Callable[..., Any], operands: Sequence[Any], attrs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of a call, computed without gradients."""
    with torch.no_grad():
        return as_list(function(*operands, **attrs))


def as_list(result: Any) -> list[torch.Tensor]:
    """Return the result of a call as a list of tensors."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def resolve_attrs(op: Operator, attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return attributes for an eager call: sizes as numbers, and a device if the operator needs one."""
    given = {name: resolve(value, sizes) for name, value in attrs.items()}
    if op.takes_device and given["device"] is None:
        given["device"] = torch.device("cpu")
    return given
