"""Bytes in fewer bytes, as tensors, and back."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

THOROUGH = 9
"""The level of compression, of which the highest is quick enough: documents repeat themselves, most counts are 0."""


def deflated(held: bytes) -> Tensor:
    """Return bytes as ``uint8[bytes]``, of zlib.

    >>> inflated(deflated(b"graph"), 5)
    b'graph'
    """
    return torch.frombuffer(bytearray(zlib.compress(held, THOROUGH)), dtype=torch.uint8)


def inflated(squeezed: Tensor, most: int) -> bytes:
    """Return what `deflated` was given.

    Args:
        squeezed: what that returned.
        most: bytes, beyond which nothing is unpacked: few bytes of a forged file may stand for any number.

    Raises:
        ValueError: it is more.
        zlib.error: the bytes are damaged.
    """
    found = zlib.decompressobj().decompress(squeezed.numpy().tobytes(), most + 1)
    if len(found) > most:
        msg = f"{len(squeezed):,} bytes stand for more than {most:,}"
        raise ValueError(msg)
    return found
