"""INT4 packing: two 4-bit integers per byte, as ONNX stores ``INT4`` and ``UINT4``."""

from __future__ import annotations

import torch

from clika_ref.core.errors import ModelError

INT4_BITS = 4


def pack_int4(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``x`` (int8 or uint8) as uint8[ceil(n / 2)], the first of each pair in the low half.

    If the number of elements is odd, the last high half is 0.

    Raises:
        ModelError: the dtype is neither int8 nor uint8, or an element does not fit in four bits.

    Source: ONNX, ``TensorProto.int32_data`` and the concept page on 4-bit types.
    """
    low, high = _int4_range(x.dtype)
    flat = x.reshape(-1)
    misfits = (flat < low) | (flat > high)
    if misfits.any():
        at = int(misfits.nonzero()[0])
        raise ModelError(
            f"element {at} is {int(flat[at])}, outside the range [{low}, {high}] of 4-bit {x.dtype}. Quantize to this "
            "range."
        )
    halves = flat.view(torch.uint8) & 0xF
    if len(halves) % 2:
        halves = torch.cat([halves, halves.new_zeros(1)])
    return halves[0::2] | (halves[1::2] << INT4_BITS)


def unpack_int4(packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the elements that `pack_int4` packed, as int8 or uint8 of the given shape.

    Raises:
        ModelError: the dtype is neither int8 nor uint8, or the number of bytes does not match the shape.
    """
    low, _ = _int4_range(dtype)
    count = torch.Size(shape).numel()
    if packed.dtype != torch.uint8 or packed.numel() != -(-count // 2):
        given = f"{packed.dtype}[{packed.numel()}]"
        raise ModelError(
            f"{count} 4-bit integers of shape {list(shape)} are stored as torch.uint8[{-(-count // 2)}], not {given}"
        )
    halves = torch.stack([packed & 0xF, packed >> INT4_BITS], dim=-1).reshape(-1)[:count].to(dtype)
    if low < 0:  # the highest of the four bits is the sign
        halves = torch.where(halves >= -low, halves + 2 * low, halves)
    return halves.reshape(shape)


def _int4_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.int8:
        return -8, 7
    if dtype == torch.uint8:
        return 0, 15
    raise ModelError(f"4-bit integers are stored as torch.int8 or torch.uint8, not {dtype}")
