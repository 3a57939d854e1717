"""Vector norms and weight normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.operators import compute_weight_norm
from clika_ref_aten.distance import vector_norm
from clika_ref_aten.reduction import as_dims, count_reduced, draw_dims, shape_after_reduction

aten = torch.ops.aten


@operator(aten.linalg_vector_norm.default, error=COMPOSE)
def linalg_vector_norm(
    x: Tensor,
    *,
    ord: float = 2,
    dim: tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``sum(abs(x) ** ord) ** (1 / ord)`` over ``dim``, or over all dims.

    Infinite orders give the largest or smallest ``abs(x)``, order 0 the number of nonzero elements.
    """
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)


@linalg_vector_norm.types
def _(x, *, dim, keepdim, dtype, **_):
    return TensorType(dtype or x.dtype, shape_after_reduction(x.shape, dim, keepdim=keepdim))


@linalg_vector_norm.onnx
def _(op, x, *, ord, dim, keepdim, dtype):
    rank = op.rank(x)
    if ord and count_reduced(op.shape(x), dim) == 1:  # the rounded exponent 1 / ord would lose digits
        return op.reshape(op.Abs(op.cast(x, op.result.dtype)), op.result.shape)
    dims = [d % rank for d in as_dims(dim) or range(rank)] if rank else None
    return vector_norm(op, op.cast(x, op.result.dtype), ord, dims, keepdims=keepdim)


@linalg_vector_norm.samples
def _(draw, s):
    x = draw(s.tensor(dtype=(torch.float32, torch.float32, torch.float64)))
    order = draw(s.choice(2, 1, 2.0, 3, 0, 0.5, -1.5, float("inf"), float("-inf")))
    dtype = draw(s.choice(None, None, torch.float64))
    return s.call(x, ord=order, dim=draw_dims(draw, s, x), keepdim=draw(s.booleans()), dtype=dtype)


@linalg_vector_norm.from_torch(
    aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype
)
def _(x, p=2, dim=None, keepdim=False, *, dtype=None):
    return linalg_vector_norm.call(x, ord=2 if p is None else p, dim=as_dims(dim), keepdim=keepdim, dtype=dtype)


@linalg_vector_norm.from_torch(aten.frobenius_norm.dim)
def _(x, dim, keepdim=False):
    return linalg_vector_norm.call(x, dim=as_dims(dim), keepdim=keepdim)


@operator(aten._weight_norm.default, error=COMPOSE)  # noqa: SLF001 - ATen's name
def weight_norm(v: Tensor, g: Tensor, *, dim: int = 0) -> Tensor:
    """``g * v / norm(v)``, with the norm over all dims but ``dim``; over all dims if ``dim`` is -1."""
    if v.numel() == 0:  # PyTorch divides an integer by 0 and crashes
        return v * g
    return compute_weight_norm(v, g, dim)


@weight_norm.types
def _(v, g, *, dim):
    return TensorType(torch.promote_types(v.dtype, g.dtype) if g.rank else v.dtype, v.shape)


@weight_norm.onnx
def _(op, v, g, *, dim):
    kept = dim if dim == -1 else dim % op.rank(v)  # other dims may be negative, as in PyTorch
    others = [i for i in range(op.rank(v)) if i != kept]
    v, g = op.promote(v, g)
    norm = op.ReduceL2(v, op.ints(others), keepdims=1) if others else op.Abs(v)
    return op.Mul(v, op.Div(g, norm))


@weight_norm.samples
def _(draw, s):
    v = draw(s.tensor(rank=(1, 5)))
    dim = draw(s.choice(0, v.rank - 1, -1, -v.rank))
    shape = [size if i == dim % v.rank else 1 for i, size in enumerate(v.shape)]
    dtype = draw(s.choice(v.dtype, torch.float64)) if dim < 0 else v.dtype  # otherwise one kernel handles both
    return s.call(v, draw(s.tensor(shape=() if dim == -1 else shape, dtype=dtype)), dim=dim)
