"""Replacements for PyTorch's composite calls that specialize on sizes or read tensor values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import optimization_hint

from clika_ref.core.errors import ModelError

aten = torch.ops.aten

COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

ASSUMED_SIZE = 64
"""The assumed value of a data-dependent size when choosing an order."""


def _kron(x: Tensor, other: Tensor) -> Tensor:
    """``result[i * k + j] = x[i] * other[j]`` along each dim; the shorter shape is padded with ones in front."""
    rank = max(x.dim(), other.dim())
    shapes = [[1] * (rank - t.dim()) + list(t.shape) for t in (x, other)]
    left = x.reshape([n for size in shapes[0] for n in (size, 1)])
    right = other.reshape([n for size in shapes[1] for n in (1, size)])
    return (left * right).reshape([a * b for a, b in zip(*shapes, strict=True)])


def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: FBT001, FBT002, N803 - ATen's
    """Powers ``x[i] ** j`` as columns, the highest first unless ``increasing``; computed by cumprod, as in eager."""
    count = x.shape[0] if N is None else N
    wide = x.to(torch.promote_types(x.dtype, torch.int64 if not x.is_floating_point() else x.dtype))
    column = wide.unsqueeze(1)
    factors = torch.cat([torch.ones_like(column), column.expand(-1, max(count - 1, 0))], 1)[:, :count]
    powers = factors.cumprod(1, dtype=wide.dtype)
    return powers if increasing else powers.flip(1)


def _cov(x: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """``(x - E x) (x - E x)^H / (n - correction)`` of the variables ``x[variable, n]``.

    Raises:
        ModelError: weights are given; PyTorch branches on their values.
    """
    if fweights is not None or aweights is not None:
        given = [n for n, w in (("fweights", fweights), ("aweights", aweights)) if w is not None]
        raise ModelError(
            f"torch.cov with weights branches on their values. Write it as {_write_weighted_cov(x, given, correction)}."
        )
    variables = x.reshape(1, -1) if x.dim() < 2 else x
    count = variables.shape[1]
    centered = variables - variables.sum(1, keepdim=True) / count
    return (centered @ centered.conj().t() / torch.sym_max(count - correction, 0)).squeeze()


def _write_weighted_cov(x: Tensor, given: Sequence[str], correction: int) -> str:
    """Return Python code for `torch.cov` with these weights, for more observations than ``correction``."""
    count = "w.sum()"
    if correction:
        off = f"{correction} * (w * aweights).sum() / w.sum()" if "aweights" in given else correction
        count = f"(w.sum() - {off})"
    adjoint = "d.conj().T" if x.is_complex() else "d.T"
    return (
        f"(w * d) @ {adjoint} / {count}, "
        f"where w = {' * '.join(given)} and d = x - (w * x).sum(-1, keepdim=True) / w.sum()"
    )


def _corrcoef(x: Tensor) -> Tensor:
    """``cov(x)[i, j] / sqrt(cov(x)[i, i] cov(x)[j, j])``, clamped to [-1, 1] against rounding."""
    found = _cov(x)
    if found.dim() == 0:
        return found / found
    deviation = (found.diagonal().real if found.is_complex() else found.diagonal()).sqrt()
    ratios = found / deviation[:, None] / deviation
    if not found.is_complex():
        return ratios.clamp(-1, 1)
    return torch.complex(ratios.real.clamp(-1, 1), ratios.imag.clamp(-1, 1))


@cache
def _chain_cost(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the minimum number of multiplications for a chain of matrices of these sizes, and its last split."""
    splits = range(1, len(sizes) - 1)
    costs = [
        (_chain_cost(sizes[: k + 1])[0] + _chain_cost(sizes[k:])[0] + sizes[0] * sizes[k] * sizes[-1], k)
        for k in splits
    ]
    return min(costs, default=(0, 0))


def _multiply_chain(matrices: Sequence[Tensor]) -> Tensor:
    """Multiply matrices in the cheapest order for the traced sizes; the order adds no guards."""
    sizes = (*(m.shape[0] for m in matrices), matrices[-1].shape[1])
    _, split = _chain_cost(tuple(optimization_hint(n, ASSUMED_SIZE) for n in sizes))
    return matrices[0] if split == 0 else _multiply_chain(matrices[:split]) @ _multiply_chain(matrices[split:])


def _multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Multiply matrices; the first and the last may be vectors."""
    first, *inner, last = tensors
    columns = last.unsqueeze(1) if last.dim() == 1 else last
    product = _multiply_chain([first.unsqueeze(0) if first.dim() == 1 else first, *inner, columns])
    product = product.squeeze(1) if last.dim() == 1 else product
    return product.squeeze(0) if first.dim() == 1 else product


PYTHON_FORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.chain_matmul.default: _multiply_chain,
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    aten.kron.default: _kron,
    aten.linalg_multi_dot.default: _multi_dot,
    aten.vander.default: _vander,
}
"""Equivalent Python functions for any size; PyTorch's own read each size as a number, or the value of a tensor."""


def _make_rnn_results(x: Tensor, hx: Tensor | Sequence[Tensor], _params: Any, *flags: Any) -> tuple[Tensor, ...]:
    """Return results with the shapes of a recurrent network's results, without computing it."""
    states = (hx,) if isinstance(hx, Tensor) else hx
    bidirectional = flags[4]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty((*x.shape[:-1], width)), *(torch.empty_like(s) for s in states))


SHAPE_ONLY_FORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.lstm.input: _make_rnn_results,
    aten.gru.input: _make_rnn_results,
    aten.rnn_tanh.input: _make_rnn_results,
    aten.rnn_relu.input: _make_rnn_results,
}
"""Shape-only replacements: PyTorch unrolls these calls over the sequence, which fixes its length."""


@contextlib.contextmanager
def replace_composites() -> Iterator[None]:
    """Register `PYTHON_FORMS` and `SHAPE_ONLY_FORMS` as kernels for fake tensors while the context lasts."""
    replaced = {**PYTHON_FORMS, **SHAPE_ONLY_FORMS}
    before = {overload: overload.py_kernels.get(COMPOSITE_KEY) for overload in replaced}
    for overload, form in replaced.items():
        _set_kernel(overload, form)
    try:
        yield
    finally:
        for overload, kernel in before.items():
            _set_kernel(overload, kernel)


def _set_kernel(overload: torch._ops.OpOverload, kernel: Callable[..., Any] | None) -> None:
    if kernel is None:
        overload.py_kernels.pop(COMPOSITE_KEY, None)
    else:
        overload.py_kernels[COMPOSITE_KEY] = kernel
    overload._dispatch_cache.clear()
