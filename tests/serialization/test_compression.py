"""Compressed bytes and packed booleans of saved files."""

import pytest
import torch

from clika_ref.serialization.container import deflate, inflate, pack_bits, unpack_bits


def test_inflate_beyond_the_limit_is_rejected():
    """A small forged file may expand without limit."""
    squeezed = deflate(bytes(5000))
    assert inflate(squeezed, 5000) == bytes(5000)
    with pytest.raises(ValueError, match=rf"{len(squeezed)} bytes decompress to more than 4,999"):
        inflate(squeezed, 4999)


def test_unpack_bits_of_another_size_is_rejected():
    packed = pack_bits(torch.ones(9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"17 booleans take 3 bytes, not \[2\]"):
        unpack_bits(packed, (17,))
