"""Operators that reorder the elements along dims: roll, flip and rot90."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import torch_sympy
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES, numel_of, same_type
from clika_ref_aten.slicing import slice_dim

aten = torch.ops.aten

BEFORE_FIRST = torch.iinfo(torch.int64).min
"""The end of a backward slice that includes the first element."""


@operator(aten.roll.default, quant=SHARED_QPARAMS, error=EXACT)
def roll(x: Tensor, *, shifts: tuple[int, ...], dims: tuple[int, ...] = ()) -> Tensor:
    """Shift elements along dims; elements shifted beyond the end reappear at the start.

    Without ``dims``, ``x`` is flattened before the roll and restored after it.
    """
    return x.roll(shifts, dims)


roll.types(same_type)


@roll.onnx
def _(op, x, *, shifts, dims):
    shape = op.shape(x)
    if not dims and len(shape) != 1:
        flat = _roll_dim(op, op.reshape(x, (numel_of(shape),)), 0, numel_of(shape), shifts[0])
        return op.reshape(flat, shape)
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        x = _roll_dim(op, x, dim, shape[dim], shift)
    return x


@roll.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES))
    form = draw(s.choice("flat", "one", "all")) if x.rank else "flat"
    dims = (draw(s.integers(-x.rank, x.rank - 1)),) if form == "one" else tuple(range(x.rank if form == "all" else 0))
    return s.call(x, shifts=tuple(draw(s.choice(1, 0, -1, 3, -7)) for _ in dims or (0,)), dims=dims)


def _roll_dim(op: Any, x: Any, dim: int, size: Any, shift: Any) -> Any:
    if isinstance(size, int) and isinstance(shift, int):
        start = -shift % max(size, 1)
    else:
        start = torch_sympy.PythonMod(-shift, torch_sympy.Max(size, 1))  # an empty dim: integers cannot divide by 0
    if start == 0:
        return x
    return op.Concat(slice_dim(op, x, dim, start=start), slice_dim(op, x, dim, end=start), axis=dim)


@operator(aten.flip.default, quant=SHARED_QPARAMS, error=EXACT)
def flip(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Reverse the order of the elements along the given dims."""
    return x.flip(dims)


flip.types(same_type)


@flip.onnx
def _(op, x, *, dims):
    return _reverse_dims(op, x, dims) if op.rank(x) else x


@flip.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES))
    return s.call(x, dims=draw(s.choice((), tuple(range(x.rank)), *((d,) for d in range(-x.rank, x.rank)))))


@flip.from_torch(aten.fliplr.default)
def _(x):
    return flip.call(x, dims=(1,))


@flip.from_torch(aten.flipud.default)
def _(x):
    return flip.call(x, dims=(0,))


@operator(aten.rot90.default, quant=SHARED_QPARAMS, error=EXACT)
def rot90(x: Tensor, *, k: int = 1, dims: tuple[int, ...] = (0, 1)) -> Tensor:
    """Rotate ``x`` by ``k * 90`` degrees in the plane of two dims, from the first towards the second."""
    return x.rot90(k, dims)


@rot90.onnx
def _(op, x, *, k, dims):
    rotated = _reverse_dims(op, x, {0: (), 1: dims[1:], 2: dims, 3: dims[:1]}[k % 4])
    return op.Transpose(rotated, perm=_swap_dims(op.rank(x), dims)) if k % 2 else rotated


@rot90.types
def _(x, *, k, dims):
    order = _swap_dims(x.rank, dims) if k % 2 else range(x.rank)
    return TensorType(x.dtype, tuple(x.shape[d] for d in order))


@rot90.samples
def _(draw, s):
    x = draw(s.tensor(rank=(2, 5), dtype=MOVABLE_DTYPES))
    return s.call(x, k=draw(s.integers(-3, 5)), dims=draw(s.choice((0, 1), (1, 0), (-1, 0), (-2, -1))))


def _swap_dims(rank: int, dims: tuple[int, ...]) -> list[int]:
    order = list(range(rank))
    first, second = dims
    order[first], order[second] = order[second], order[first]
    return order


def _reverse_dims(op: Any, x: Any, dims: tuple[int, ...]) -> Any:
    if not dims:
        return x
    count = len(dims)
    return op.Slice(x, op.ints([-1] * count), op.ints([BEFORE_FIRST] * count), op.ints(dims), op.ints([-1] * count))
