"""Booleans packed as bits."""

from __future__ import annotations

import torch
from torch import Tensor

BITS_PER_BYTE = 8


def pack_bits(x: Tensor) -> Tensor:
    """Pack ``bool[...]`` into ``uint8[ceil(n / 8)]``, lowest bit first; the last byte is padded with zeros.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = torch.nn.functional.pad(x.reshape(-1).to(torch.uint8), (0, -x.numel() % BITS_PER_BYTE))
    return (flat.reshape(-1, BITS_PER_BYTE) << _bit_indices(x)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unpack the result of `pack_bits`.

    Raises:
        ValueError: the number of bytes does not match the shape.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), (3,))
    tensor([ True, False,  True])
    """
    count = torch.Size(shape).numel()
    if packed.ndim != 1 or len(packed) != -(-count // BITS_PER_BYTE):
        msg = f"{count} booleans take {-(-count // BITS_PER_BYTE)} bytes, not {list(packed.shape)}"
        raise ValueError(msg)
    return ((packed[:, None] >> _bit_indices(packed)) & 1).bool().reshape(-1)[:count].reshape(shape)


def _bit_indices(like: Tensor) -> Tensor:
    return torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=like.device)
