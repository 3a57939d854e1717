"""Store tensors in an npz file, bit for bit and with their layout, without pickle."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clika_ref.serialization.graph_format import DTYPES_BY_NAME
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.reproducing.repro_script import tensor_of

MAX_ELEMENTS = 2**26
"""Maximum number of elements of a stored layout: 256 MiB of float32, a thousand times the size that the suite draws."""

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes of the same size, to store dtypes that NumPy lacks (bfloat16, the float8 dtypes)."""

_NUMPY_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def layout_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the layout that `rebuild_tensor` needs: dtype, shape, strides and offset, in elements."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": int(tensor.storage_offset()),
    }


def elements_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements ``tensor[...]`` in order of their indices, as an array of the same shape."""
    plain = tensor.detach().cpu().contiguous()
    return (plain if plain.dtype in _NUMPY_DTYPES else plain.view(_INTEGER_DTYPES[plain.element_size()])).numpy()


def rebuild_tensor(layout: Mapping[str, Any], elements: np.ndarray) -> torch.Tensor:
    """Return the tensor that `layout_of` and `elements_of` were called on: equal bits, strides and offset.

    Raises:
        ReportError: the layout is malformed, or the elements do not fit it.
    """
    try:
        shape, strides = ([int(n) for n in layout[key]] for key in ("shape", "strides"))
        offset = int(layout["offset"])
        is_possible = layout["dtype"] in DTYPES_BY_NAME and len(shape) == len(strides)
        if not is_possible or min([*shape, *strides, offset], default=0) < 0:
            raise ReportError(f"a tensor has the invalid layout {dict(layout)}")
        span = 1 + offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n)
        if max(span, math.prod(shape)) > MAX_ELEMENTS:
            raise ReportError(f"a tensor spans {span:,} elements, more than the limit of {MAX_ELEMENTS:,}")
        return tensor_of(dict(layout), elements)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ReportError(
            f"a tensor {dict(layout)} does not fit its elements {elements.dtype}{list(elements.shape)}: {error}"
        ) from error


def to_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays as the bytes of an npz file; equal arrays give equal bytes."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType] - the stub accepts only one array
    return file.getvalue()


def from_npz(content: bytes, name: str, limit_bytes: int) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file of at most ``limit_bytes``, unpacked.

    Raises:
        ReportError: it is damaged, larger than that, or contains Python objects.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > limit_bytes:
            raise ReportError(f"{name} unpacks to {size:,} bytes, more than the limit of {limit_bytes:,}")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {key: np.asarray(file[key]) for key in file.files}
    except (zipfile.BadZipFile, ValueError, TypeError, OSError, EOFError, MemoryError, KeyError) as error:
        raise ReportError(f"{name} is damaged, or does not consist of plain arrays: {error}") from error
