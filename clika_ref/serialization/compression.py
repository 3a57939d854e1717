"""Compression of bytes into tensors."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

COMPRESSION_LEVEL = 9
"""Compression level. The highest is fast enough: documents are repetitive, and most counts are 0."""


def deflate(held: bytes) -> Tensor:
    """Compress bytes with zlib into ``uint8[bytes]``.

    >>> inflate(deflate(b"graph"), 5)
    b'graph'
    """
    return torch.frombuffer(bytearray(zlib.compress(held, COMPRESSION_LEVEL)), dtype=torch.uint8)


def inflate(squeezed: Tensor, most: int) -> bytes:
    """Decompress the result of `deflate`.

    Args:
        squeezed: the compressed bytes.
        most: maximum size of the result, because a small forged file may expand without limit.

    Raises:
        ValueError: the result is larger.
        zlib.error: the bytes are damaged.
    """
    found = zlib.decompressobj().decompress(squeezed.numpy().tobytes(), most + 1)
    if len(found) > most:
        msg = f"{len(squeezed):,} bytes decompress to more than {most:,}"
        raise ValueError(msg)
    return found
