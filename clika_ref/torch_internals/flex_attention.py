"""FlexAttention: the functions that ``torch.nn.attention.flex_attention`` calls.

Names are attributes of `find_module`.
"""

from __future__ import annotations

import sys
from typing import Any

CALL_KERNEL = "flex_attention_hop"
"""Computes attention, its log-sum-exp and the maximum of its scores."""

CHECK_DEVICE = "_validate_device"
"""Rejects gradients on devices without a kernel for them."""

CALLS_WITHOUT_COMPILING = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""Whether ``flex_attention`` calls the kernel itself, not ``torch.compile``."""

CREATE_MASK = "create_mask"
"""Computes a mask from its function."""

FIND_BLOCKS = "_convert_mask_to_block_mask"
"""Finds the blocks of a mask that have an element, and those that are full."""

CREATE_BLOCK_MASK = "_create_sparse_block_from_block_mask"
"""Makes the tables of the blocks."""

NAMES = (CALL_KERNEL, CHECK_DEVICE, CALLS_WITHOUT_COMPILING, CREATE_MASK, FIND_BLOCKS, CREATE_BLOCK_MASK)
"""All names."""


def find_module() -> Any:
    """Return the module of FlexAttention if the model has imported it; otherwise None."""
    return sys.modules.get("torch.nn.attention.flex_attention")
