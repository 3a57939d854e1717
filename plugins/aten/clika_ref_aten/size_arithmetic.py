"""Helpers for operators that only move elements: arithmetic of symbolic sizes, indices, and dtypes for samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import sympy
import torch

from clika_ref.core.types import Dim, TensorType
from clika_ref.torch_internals.symbols import torch_sympy

MOVABLE_DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
"""One dtype per kind of storage: operators that move elements accept all of them."""


OPEN_END = torch.iinfo(torch.int64).max
"""The end of an open slice: ONNX clamps it to the size of the dim, as Python does."""


def normalize_size(length: Any) -> Dim:
    """Return a size as a Python int if it is constant."""
    return int(length) if isinstance(length, sympy.Integer) else length


def numel_of(lengths: tuple[Dim, ...]) -> Dim:
    """Return the product of sizes."""
    return normalize_size(math.prod(lengths))


def floor_quotient(a: Dim, b: Dim) -> Dim:
    """Return ``floor(a / b)``, without a FloorDiv where the quotient is an integer for all symbol values."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    for exact in (a / b, sympy.cancel(a / b)):
        if exact.is_integer:
            return normalize_size(exact)
    return normalize_size(torch_sympy.FloorDiv(a, b))


def min_size(a: Dim, b: Dim) -> Any:
    """Return the smaller of two sizes, without a Min where it is known which one that is."""
    if is_nonnegative(b - a) or _is_floor_fraction(a, b):
        return a
    if is_nonnegative(a - b) or _is_floor_fraction(b, a):
        return b
    return torch_sympy.Min(a, b)


def clamp_to_zero(n: Any) -> Any:
    """Return the larger of a number and 0, without a Max where it is known which one that is."""
    if is_nonnegative(-n):
        return 0
    return n if is_nonnegative(n) else torch_sympy.Max(n, 0)


def is_nonnegative(number: Any) -> bool:
    """Return whether a number or an expression is at least 0 for all symbol values."""
    return bool(number.is_nonnegative) if isinstance(number, sympy.Basic) else number >= 0


def _is_floor_fraction(a: Dim, b: Dim) -> bool:
    """Return whether ``a`` is ``b`` floor-divided by an integer; sympy does not infer ``a <= b`` from it."""
    return isinstance(a, torch_sympy.FloorDiv) and a.args[0] == b


def slice_length(size: Dim, start: Any, end: Any, step: Dim) -> Dim:
    """Return the number of elements that ``[start:end:step]`` selects along a dim of size ``size``.

    An expression of unknown sign is assumed to be a valid bound, as in the exporter. The end of ``x[:n - 1]`` is
    not one if ``n`` is 0, and then selects nothing.
    """
    start, end = (0 if start is None else start), (None if end == OPEN_END else end)
    first = clamp_to_zero(size + start) if is_nonnegative(-1 - start) else start
    last = size if end is None else end
    if isinstance(last, int) and last < 0:
        last = size + last
    elif is_nonnegative(last):
        last = min_size(last, size)
    length = normalize_size(last - first)
    if (
        isinstance(length, int)
        or is_nonnegative(size - last)
        or (isinstance(start, int) and start != 0)
        or isinstance(end, int)
    ):
        length = clamp_to_zero(length)
    return length if step == 1 else floor_quotient(length + step - 1, step)


def same_type(x: TensorType, *_: Any, **__: Any) -> TensorType:
    """Type rule that returns the type of the first operand; some references do not support symbolic sizes."""
    return x


def replace_dim(x: TensorType, dim: int, length: Dim) -> TensorType:
    """Return a type with the size of one dim replaced."""
    shape = list(x.shape)
    shape[dim] = length
    return replace(x, shape=tuple(shape))


def make_index_range(op: Any, length: Dim) -> Any:
    """Return ``int64[length]``: 0, 1, 2, ..."""
    if isinstance(length, int):
        return op.constant(torch.arange(length), torch.int64)
    ends = (op.scalar(n, torch.int64) for n in (0, length, 1))
    return op.declare(op.Range(*ends), torch.int64)


def make_strided_indices(op: Any, sizes: tuple[Any, ...], strides: tuple[Any, ...], offset: Any) -> Any:
    """Return ``int64[sizes]`` with ``offset + i * strides[0] + j * strides[1] + ...`` at ``[i, j, ...]``."""
    rank = len(sizes)
    if all(isinstance(n, int) for n in (*sizes, *strides, offset)):
        indices = torch.full((1,) * rank, offset)
        for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            indices = indices + (torch.arange(size) * stride).reshape(-1, *[1] * (rank - axis - 1))
        return op.constant(indices, torch.int64)
    indices = op.scalar(offset, torch.int64)
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = op.Mul(make_index_range(op, size), op.scalar(stride, torch.int64))
        steps = op.Unsqueeze(steps, op.ints(range(1, rank - axis))) if axis < rank - 1 else steps
        indices = op.Add(indices, steps)
    return indices
