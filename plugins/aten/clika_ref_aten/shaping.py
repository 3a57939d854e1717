"""Operators that give the same elements another shape or order."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SAME_SCALE

aten = torch.ops.aten


@operator(aten.permute.default, quant=SAME_SCALE, error=EXACT)
def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Reorder sides: side ``i`` of the result is side ``dims[i]`` of ``x``."""
    return x.permute(dims)


@permute.onnx
def _(op, x, *, dims):
    return op.Transpose(x, perm=[d % len(dims) for d in dims]) if dims else op.Identity(x)


@permute.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 4)))
    order = list(range(x.rank))
    dims = []
    for _ in range(x.rank):
        dims.append(order.pop(draw(s.integers(0, len(order) - 1))))
    return s.call(x, dims=tuple(dims))


@permute.write_back
def _(build, base, new, *, dims):
    inverse = [0] * len(dims)
    for i, d in enumerate(dims):
        inverse[d % len(dims)] = i
    return build(permute, new, dims=tuple(inverse), types=(base.type,))


@permute.from_torch(aten.transpose.int, aten.swapaxes.default)
def _(x, dim0, dim1):
    rank = max(x.type.rank, 1)
    dims = list(range(x.type.rank))
    if dims:
        dims[dim0 % rank], dims[dim1 % rank] = dims[dim1 % rank], dims[dim0 % rank]
    return permute.call(x, dims=tuple(dims))
