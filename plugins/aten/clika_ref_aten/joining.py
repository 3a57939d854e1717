"""Operators that join tensors, and those that take them apart."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SAME_SCALE, SHARED_SCALE

aten = torch.ops.aten


@operator(aten.cat.default, quant=SHARED_SCALE, error=EXACT)
def cat(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Join tensors along an existing side."""
    return torch.cat(tensors, dim)


@cat.onnx
def _(op, *tensors, dim):
    tensors = [t for t in op.promote(*tensors) if op.shape(t) != (0,)]  # torch lets empty vectors join anything
    return op.Concat(*tensors, axis=dim)


@cat.samples
def _(draw, s):
    first = draw(s.tensor(rank=(1, 4)))
    dim = draw(s.integers(-first.rank, first.rank - 1))
    shape = list(first.shape)
    shape[dim] = draw(s.integers(1, 4))
    return s.call(first, draw(s.tensor(shape=shape)), dim=dim)


@operator(aten.split_with_sizes.default, quant=SAME_SCALE, error=EXACT)
def split_with_sizes(x: Tensor, *, split_sizes: tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
    """Cut a side into pieces of the given lengths."""
    return torch.split_with_sizes(x, split_sizes, dim)


@split_with_sizes.onnx
def _(op, x, *, split_sizes, dim):
    pieces = op.Split(x, op.ints(split_sizes), axis=dim, outputs=len(split_sizes))
    return pieces if isinstance(pieces, tuple) else (pieces,)


@split_with_sizes.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 4), side=(2, 6)))
    dim = draw(s.integers(-x.rank, x.rank - 1))
    cut = draw(s.integers(1, x.shape[dim] - 1))
    return s.call(x, split_sizes=(cut, x.shape[dim] - cut), dim=dim)
