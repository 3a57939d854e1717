"""Casts to another dtype, and identities such as clone and detach."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.operators import operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref_aten.elementwise import ALL_DTYPES, FLOATS, unary_sampler

aten = torch.ops.aten


@operator(aten.to.dtype, error=EXACT)
def to(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``x`` cast to another dtype; floats are truncated to integers, and become bools by ``x != 0``."""
    return x.to(dtype)


@to.onnx
def _(op, x, *, dtype):
    return op.cast(x, dtype)


@to.samples
def _(draw, s):
    x = draw(s.tensor(dtype=ALL_DTYPES, low=0, high=9))
    dtype = draw(s.choice(*ALL_DTYPES))
    if x.dtype.is_floating_point and not dtype.is_floating_point and dtype != torch.bool:
        limits = torch.iinfo(dtype).min // 2, torch.iinfo(dtype).max // 2
        x = replace(x, low=max(-9, limits[0]), domain=limits, nan=False)  # in C, out-of-range casts are undefined
    return s.call(x, dtype=dtype)


@to.write_back
def _(build, base, new, *, dtype):
    return build(to, new, dtype=base.type.dtype)


@to.from_torch(aten.to.dtype_layout, aten._to_copy.default)  # noqa: SLF001 - an overload's name
def _(x, *, dtype=None, **storage):
    return to.call(x, dtype=dtype or x.type.dtype)


@to.from_torch(aten.to.device)
def _(x, device, dtype, *storage, **more):
    return to.call(x, dtype=dtype)


@to.from_torch(aten.to.other, aten.type_as.default)
def _(x, other, *storage, **more):
    return to.call(x, dtype=other.type.dtype)


@operator(
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    quant=SHARED_QPARAMS,
    error=EXACT,
)
def identity(x: Tensor) -> Tensor:
    """``x`` itself: copies and memory formats do not change its elements."""
    return x.clone()


@identity.onnx
def _(op, x):
    return x


identity.samples(unary_sampler(dtype=ALL_DTYPES))


@identity.write_back
def _(build, base, new):
    return new


@operator(quant=SHARED_QPARAMS, error=EXACT)
def overwritten(new: Tensor, x: Tensor) -> Tensor:
    """``new`` with the autograd history of ``x``: the result of a write to ``x`` that autograd does not record.

    Both have the same type. Gradients flow to ``x`` as if nothing had been written, and none flow to ``new``.
    """
    copy = x.clone()
    with torch.no_grad():
        return copy.copy_(new)


@overwritten.onnx
def _(op, new, x):
    return new


@overwritten.samples
def _(draw, s):
    new = draw(s.tensor(dtype=FLOATS))
    return s.call(new, draw(s.tensor(shape=new.shape, dtype=(new.dtype,))))


@operator(aten.detach.default, quant=SHARED_QPARAMS, error=EXACT)
def detach(x: Tensor) -> Tensor:
    """``x`` without its autograd history: no gradient flows back through it."""
    return x.detach()


@detach.onnx
def _(op, x):
    return x


detach.samples(unary_sampler(dtype=ALL_DTYPES))


@detach.write_back
def _(build, base, new):
    differentiable = base.type.dtype.is_floating_point or base.type.dtype.is_complex
    return build(overwritten, new, base, types=(base.type,)) if differentiable else new
