"""Operators that change the shape of a tensor, or the order of its dims."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref_aten.size_arithmetic import MOVABLE_DTYPES, floor_quotient, normalize_size, numel_of

aten = torch.ops.aten


@operator(quant=SHARED_QPARAMS, error=EXACT)
def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """The elements of ``x`` in order, in another shape with the same number of elements."""
    return x.reshape(shape)


@reshape.onnx
def _(op, x, *, shape):
    return x if shape == op.shape(x) else op.reshape(x, shape)


@reshape.types
def _(x, *, shape):
    counts = numel_of(x.shape), numel_of(shape)
    if all(isinstance(n, int) for n in counts) and counts[0] != counts[1]:
        raise ValueError(f"{x} has {counts[0]} elements, but the shape {shape} has {counts[1]}")
    return TensorType(x.dtype, shape)


@reshape.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES))
    cut = draw(s.integers(0, x.rank))
    merged = (numel_of(x.shape[:cut]), numel_of(x.shape[cut:]))
    return s.call(x, shape=draw(s.choice(merged, (1, *merged), (numel_of(x.shape),), x.shape[::-1], (*x.shape, 1))))


@reshape.write_back
def _(build, base, new, *, shape):
    return build(reshape, new, shape=base.type.shape, types=(base.type,))


@reshape.from_torch(aten.reshape.default, aten._reshape_copy.default)  # noqa: SLF001 - a name of ATen's
def _(x, shape):
    return reshape.call(x, shape=_infer_missing_size(x.type.shape, shape))


@reshape.from_torch(aten.view.default, aten.view_copy.default)
@reshape.from_torch(aten._unsafe_view.default, aten._reshape_alias.default)  # noqa: SLF001 - as above
def _(x, size, stride=None):
    return reshape.call(x, shape=_infer_missing_size(x.type.shape, size))


@reshape.from_torch(aten.view_as.default, aten.reshape_as.default)
def _(x, other):
    return reshape.call(x, shape=other.type.shape)


@reshape.from_torch(aten.flatten.using_ints)
def _(x, start_dim=0, end_dim=-1):
    shape = x.type.shape or (1,)
    first, last = start_dim % len(shape), end_dim % len(shape) + 1
    return reshape.call(x, shape=(*shape[:first], numel_of(shape[first:last]), *shape[last:]))


@reshape.from_torch(aten.ravel.default)
def _(x):
    return reshape.call(x, shape=(numel_of(x.type.shape),))


@reshape.from_torch(aten.unflatten.int)
def _(x, dim, sizes):
    shape, dim = x.type.shape, dim % x.type.rank
    return reshape.call(x, shape=(*shape[:dim], *_infer_missing_size((shape[dim],), sizes), *shape[dim + 1 :]))


@reshape.from_torch(aten.atleast_1d.default)
def _(x):
    return reshape.call(x, shape=x.type.shape or (1,))


@reshape.from_torch(aten.atleast_2d.default)
def _(x):
    return reshape.call(x, shape=(*(1,) * (2 - x.type.rank), *x.type.shape))


@reshape.from_torch(aten.atleast_3d.default)
def _(x):
    shape = x.type.shape or (1,)
    return reshape.call(x, shape={1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape))


def _infer_missing_size(shape, requested):
    """Return ``requested`` with a size of -1 inferred from the number of elements."""
    requested = tuple(map(normalize_size, requested))
    if -1 not in requested:
        return requested
    i = requested.index(-1)
    rest = numel_of(requested[:i] + requested[i + 1 :])
    return (*requested[:i], floor_quotient(numel_of(shape), rest), *requested[i + 1 :])


@operator(quant=SHARED_QPARAMS, error=EXACT)
def squeeze(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """``x`` without those of the given dims that have size 1; the given dims must not be dynamic."""
    return x.squeeze(dims)


@squeeze.onnx
def _(op, x, *, dims):
    gone = _unit_dims(op.shape(x), dims)
    return op.Squeeze(x, op.ints(gone)) if gone else x


@squeeze.types
def _(x, *, dims):
    gone = _unit_dims(x.shape, dims)
    dynamic = [d for d in dims if x.rank and not isinstance(x.shape[d], int)]
    if dynamic:
        raise ValueError(f"squeeze({x}, dims={dims}): whether dim {dynamic[0]} has size 1 differs from call to call")
    return TensorType(x.dtype, tuple(n for i, n in enumerate(x.shape) if i not in gone))


@squeeze.samples
def _(draw, s):
    x = draw(s.tensor(rank=(1, 5), size=(1, 2), dtype=MOVABLE_DTYPES))
    every = tuple(range(x.rank))
    return s.call(x, dims=draw(s.choice((0,), (-1,), every, every[:2], ())))


@squeeze.write_back
def _(build, base, new, *, dims):
    return build(reshape, new, shape=base.type.shape, types=(base.type,))


@squeeze.from_torch(aten.squeeze.default, aten.squeeze_copy.default)
def _(x):
    return squeeze.call(x, dims=_unit_dims(x.type.shape, range(x.type.rank)))


@squeeze.from_torch(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def _(x, dim):
    return squeeze.call(x, dims=_unit_dims(x.type.shape, dim if isinstance(dim, tuple | list) else (dim,)))


def _unit_dims(shape, dims):
    """Return the given dims that are known to have size 1."""
    return tuple(sorted({d % len(shape) for d in dims if shape[d] == 1})) if shape else ()


@operator(aten.unsqueeze.default, aten.unsqueeze_copy.default, quant=SHARED_QPARAMS, error=EXACT)
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    """``x`` with a new dim of size 1 at position ``dim``."""
    return x.unsqueeze(dim)


@unsqueeze.onnx
def _(op, x, *, dim):
    return op.Unsqueeze(x, op.ints([dim]))


@unsqueeze.types
def _(x, *, dim):
    if not -x.rank - 1 <= dim <= x.rank:
        raise ValueError(f"unsqueeze({x}, dim={dim}): dim must be in [{-x.rank - 1}, {x.rank}]")
    dim %= x.rank + 1
    return TensorType(x.dtype, (*x.shape[:dim], 1, *x.shape[dim:]))


@unsqueeze.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES))
    return s.call(x, dim=draw(s.integers(-x.rank - 1, x.rank)))


@unsqueeze.write_back
def _(build, base, new, *, dim):
    return build(squeeze, new, dims=(dim % (base.type.rank + 1),), types=(base.type,))


@operator(aten.permute.default, aten.permute_copy.default, quant=SHARED_QPARAMS, error=EXACT)
def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Permute dims: dim ``i`` of the result is dim ``dims[i]`` of ``x``."""
    return x.permute(dims)


@permute.onnx
def _(op, x, *, dims):
    order = [d % len(dims) for d in dims]
    return x if order == sorted(order) else op.Transpose(x, perm=order)


@permute.types
def _(x, *, dims):
    if sorted(d % max(x.rank, 1) for d in dims) != list(range(x.rank)):
        raise ValueError(f"permute({x}, dims={dims}): dims must name each dim of the operand once")
    return TensorType(x.dtype, tuple(x.shape[d] for d in dims))


@permute.samples
def _(draw, s):
    x = draw(s.tensor(dtype=MOVABLE_DTYPES))
    order = list(range(x.rank))
    picked = [order.pop(draw(s.integers(0, len(order) - 1))) for _ in range(x.rank)]
    return s.call(x, dims=tuple(d - draw(s.choice(0, x.rank)) for d in picked))


@permute.write_back
def _(build, base, new, *, dims):
    inverse = [0] * len(dims)
    for i, d in enumerate(dims):
        inverse[d % len(dims)] = i
    return build(permute, new, dims=tuple(inverse), types=(base.type,))


@permute.from_torch(aten.transpose.int, aten.transpose_copy.int, aten.swapdims.default)
def _(x, dim0, dim1):
    return _swap_dims(x, dim0, dim1)


@permute.from_torch(aten.swapaxes.default)
def _(x, axis0, axis1):
    return _swap_dims(x, axis0, axis1)


@permute.from_torch(aten.mT.default)
def _(x):
    return _swap_dims(x, -2, -1)


@permute.from_torch(aten.mH.default, aten.adjoint.default, aten.matrix_H.default)
def _(x):
    if x.type.dtype.is_complex:
        raise ModelError(
            f"the adjoint of {x.type} conjugates, but complex tensors are not supported. Store real and imaginary "
            "parts as two real tensors."
        )
    return _swap_dims(x, -2, -1) if x.type.rank else permute.call(x, dims=())


@permute.from_torch(aten.t.default, aten.t_copy.default, aten.numpy_T.default)
def _(x):
    return permute.call(x, dims=tuple(reversed(range(x.type.rank))))


@permute.from_torch(aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist)
def _(x, source, destination):
    rank = max(x.type.rank, 1)
    pairs = zip(*(d if isinstance(d, tuple | list) else (d,) for d in (source, destination)), strict=True)
    destinations = {there % rank: here % rank for here, there in pairs}
    rest = iter(d for d in range(x.type.rank) if d not in destinations.values())
    return permute.call(x, dims=tuple(destinations[i] if i in destinations else next(rest) for i in range(x.type.rank)))


def _swap_dims(x, first, second):
    dims = list(range(x.type.rank))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    return permute.call(x, dims=tuple(dims))
