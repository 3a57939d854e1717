"""Forms of calls that select elements by value or by index, and of calls on the parts of floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Reduce slices of a source into those of x that an index names."""
    wide, values = _at_least_1d(x), _at_least_1d(source)
    shape = [1] * wide.dim()
    shape[dim] = -1
    indices = index.reshape(shape).expand(values.shape)
    return wide.scatter_reduce(dim, indices, values, reduce, include_self=include_self).reshape(x.shape)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    """Write values to positions of the flattened tensor."""
    return x.flatten().index_put([index.flatten()], source.flatten(), accumulate).reshape(x.shape)


def _sort_known(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in order with NaN as infinity at the end, their indices, and how many are not NaN."""
    values, indices = torch.sort(torch.where(x.isnan(), torch.inf, x), stable=True, dim=dim)
    return values, indices, (~x.isnan()).sum(dim, keepdim=True)


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - ATen's
    """The lower median of the elements that are not NaN, and its index."""
    wide = _at_least_1d(x)
    values, indices, count = _sort_known(wide, dim)
    chosen = ((count - 1) // 2).clamp(min=0)
    found = torch.where(count == 0, torch.nan, values.gather(dim, chosen))
    results = found, indices.gather(dim, chosen)
    if x.dim() == 0:
        return results[0].reshape(()), results[1].reshape(())
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


def _nanmedian(x: Tensor) -> Tensor:
    """The lower median of all elements that are not NaN."""
    return _nanmedian_along(x.flatten(), 0)[0]


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - ATen's
    """The smallest of the most frequent elements, and its last index."""
    wide = _at_least_1d(x).movedim(dim, -1)
    counts = (wide[..., None] == wide[..., None, :]).sum(-1)
    is_frequent = counts == counts.amax(-1, keepdim=True)
    largest = torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).max
    value = torch.where(is_frequent, wide, largest).amin(-1, keepdim=True)
    positions = torch.arange(wide.shape[-1], device=x.device)
    index = torch.where(wide == value, positions, -1).amax(-1, keepdim=True)
    results = value.movedim(-1, dim), index.movedim(-1, dim)
    if x.dim() == 0:
        return results[0].reshape(()), results[1].reshape(())
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mantissa in [1/2, 1) and the exponent, ``int32``."""
    size = x.abs().double()
    is_plain = (size > 0) & size.isfinite()
    exponent = torch.where(is_plain, size, 1.0).log2().floor() + 1
    mantissa = x.double() * torch.exp2(-exponent)
    is_large, is_small = mantissa.abs() >= 1, is_plain & (mantissa.abs() < 0.5)  # the logarithm is rounded
    mantissa = torch.where(is_large, mantissa / 2, torch.where(is_small, mantissa * 2, mantissa))
    exponent = exponent + is_large.double() - is_small.double()
    found = torch.where(is_plain, mantissa, x.double()).to(x.dtype)
    return found, torch.where(is_plain, exponent, 0.0).to(torch.int32)


SELECTION_FORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.index_reduce.default: _index_reduce,
    aten.put.default: _put,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_along,
    aten.mode.default: _mode,
    aten.frexp.Tensor: _frexp,
}
"""Forms by the call of PyTorch that they replace."""
