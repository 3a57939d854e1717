"""Packing of two INT4 values in a byte, and unpacking."""

from __future__ import annotations

import onnx
import pytest
import torch

from clika_ref.core.errors import ModelError
from clika_ref.onnx_export.int4 import pack_int4, unpack_int4

SIGNED = torch.tensor([-8, 7, -1, 0, 3], dtype=torch.int8)
UNSIGNED = torch.tensor([0, 15, 8, 7, 1], dtype=torch.uint8)


@pytest.mark.parametrize("x", [SIGNED, SIGNED[:4], UNSIGNED, UNSIGNED[:2], SIGNED[:0], SIGNED[:1]])
def test_unpack_int4_restores_packed_tensor(x):
    """Unpacking restores the packed elements."""
    assert torch.equal(unpack_int4(pack_int4(x), (len(x),), x.dtype), x)


def test_unpack_int4_transposed_view_restores_shape():
    """A packed transposed view is restored with its shape."""
    x = SIGNED[:4].reshape(2, 2).t()
    assert torch.equal(unpack_int4(pack_int4(x), (2, 2), torch.int8), x)


@pytest.mark.parametrize(
    ("x", "kind"), [(SIGNED, onnx.TensorProto.INT4), (UNSIGNED, onnx.TensorProto.UINT4), (SIGNED[:3], 22)]
)
def test_pack_int4_bytes_match_onnx(x, kind):
    """ONNX reads the packed bytes as the same elements."""
    proto = onnx.TensorProto(data_type=kind, dims=[len(x)], raw_data=pack_int4(x).numpy().tobytes())
    assert onnx.numpy_helper.to_array(proto).astype(int).tolist() == x.tolist()


def test_pack_int4_odd_count_pads_zero():
    """The last four bits of an odd count are zero."""
    assert pack_int4(torch.tensor([-1], dtype=torch.int8)).tolist() == [15]


def test_pack_int4_out_of_range_or_wrong_dtype_raises():
    """An element outside the range, or another dtype, raises an error."""
    with pytest.raises(ModelError, match=r"element 1 is 8, outside the range \[-8, 7\] of 4-bit torch.int8"):
        pack_int4(torch.tensor([0, 8], dtype=torch.int8))
    with pytest.raises(ModelError, match=r"stored as torch.int8 or torch.uint8, not torch.int32"):
        pack_int4(torch.tensor([0], dtype=torch.int32))


def test_unpack_int4_wrong_length_raises():
    """A wrong number of bytes raises an error."""
    with pytest.raises(
        ModelError, match=r"5 4-bit integers of shape \[5\] are stored as torch.uint8\[3\], not torch.uint8\[2\]"
    ):
        unpack_int4(torch.zeros(2, dtype=torch.uint8), (5,), torch.int8)
