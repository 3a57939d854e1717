"""Nested values: PyTorch's pytrees, whose Python implementation is in a private module."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["get_node_type", "pytree"]


def get_node_type(value: Any) -> Any:
    """Return the class under which a value is registered, if it is: that of a named tuple is ``namedtuple``."""
    return pytree._get_node_type(value)
