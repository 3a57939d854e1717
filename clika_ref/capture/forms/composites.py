"""Replacements for PyTorch's composite calls that specialize on sizes or read tensor values."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import optimization_hint

from clika_ref.capture.forms.fourier_functions import FOURIER_FORMS
from clika_ref.capture.forms.fourier_transforms import istft, stft
from clika_ref.capture.forms.histogram_forms import HISTOGRAM_FORMS
from clika_ref.capture.forms.loss_forms import CTC_FORMS
from clika_ref.capture.forms.singular_values import find_matrix_norm, find_norm, solve_least_squares
from clika_ref.capture.patching import import_in_context
from clika_ref.torch_internals.operators import (
    INDUCTOR_DECOMPOSITIONS,
    OpOverload,
    find_composite_kernel,
    set_composite_kernel,
)

aten = torch.ops.aten

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


def _cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """``(w (x - E x)) (x - E x)^H / norm`` of the variables ``x[variable, n]``; the weights w are 1 if not given."""
    variables = x.reshape(1, -1) if x.dim() < 2 else x
    given = [weights for weights in (fweights, aweights) if weights is not None]
    if not given:
        count = variables.shape[1]
        centered = variables - variables.sum(1, keepdim=True) / count
        return (centered @ centered.conj().t() / torch.sym_max(count - correction, 0)).squeeze()
    weights = functools.reduce(torch.mul, given)
    total = weights.sum()
    centered = variables - (variables * weights).sum(1, keepdim=True) / total
    norm = total
    if correction:
        norm = total - (correction if aweights is None else correction * (weights * aweights).sum() / total)
    return (centered @ (centered * weights).t().conj() / norm.clamp(min=0)).squeeze()


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


def _gradient(
    x: Tensor, *, spacing: Any = None, dim: int | Sequence[int] | None = None, edge_order: int = 1
) -> list[Tensor]:
    """Central differences along each dim, and one-sided ones at its first and last index."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    steps = spacing if isinstance(spacing, Sequence) else [1 if spacing is None else spacing] * len(dims)
    return [_difference(x, own, step, edge_order) for own, step in zip(dims, steps, strict=True)]


def _difference(x: Tensor, dim: int, step: Any, edge_order: int) -> Tensor:
    def at(position: int) -> Tensor:
        return x.narrow(dim, position if position >= 0 else x.shape[dim] + position, 1)

    if edge_order == 1:
        first, last = (at(1) - at(0)) / step, (at(-1) - at(-2)) / step
    else:
        first = (-1.5 * at(0) + 2 * at(1) - 0.5 * at(2)) / step
        last = (0.5 * at(-3) - 2 * at(-2) + 1.5 * at(-1)) / step
    inner = x.shape[dim] - 2
    return torch.cat([first, (x.narrow(dim, 2, inner) - x.narrow(dim, 0, inner)) / step / 2, last], dim)


@functools.cache
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


def _pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,  # noqa: FBT001, FBT002 - ATen's
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Stack sequences, padded to the longest."""
    longest = functools.reduce(torch.sym_max, [sequence.shape[0] for sequence in sequences])
    padded: list[Tensor] = []
    for sequence in sequences:
        missing = longest - sequence.shape[0]
        sides = [0, missing] if padding_side == "right" else [missing, 0]
        padded.append(torch.constant_pad_nd(sequence, [0, 0] * (sequence.dim() - 1) + sides, padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - ATen's
    """Rows of ``r`` elements at ascending positions, in lexicographic order."""
    if not r:
        return x.new_empty((0,))
    positions = torch.meshgrid([torch.arange(x.shape[0], device=x.device)] * r, indexing="ij")
    ascending = [a <= b if with_replacement else a < b for a, b in itertools.pairwise(positions)]
    chosen = functools.reduce(torch.logical_and, ascending, torch.ones_like(positions[0], dtype=torch.bool))
    return x[chosen.nonzero()]


PYTHON_FORMS: dict[OpOverload, Callable[..., Any]] = {
    **CTC_FORMS,
    **FOURIER_FORMS,
    **HISTOGRAM_FORMS,
    aten.chain_matmul.default: _multiply_chain,
    aten.combinations.default: _combinations,
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    **{
        getattr(aten.gradient, name): _gradient
        for name in ("scalarint", "scalararray", "array", "scalarrayint", "scalarrayarray")
    },
    aten.istft.default: istft,
    aten.kron.default: _kron,
    aten.linalg_lstsq.default: solve_least_squares,
    aten.linalg_matrix_norm.default: find_matrix_norm,
    aten.linalg_multi_dot.default: _multi_dot,
    aten.linalg_norm.default: find_norm,
    aten.pad_sequence.default: _pad_sequence,
    aten.stft.default: stft,
    aten.vander.default: _vander,
}
"""Equivalent Python functions for any size; PyTorch's own read each size as a number, or the value of a tensor."""


def _make_rnn_results(x: Tensor, hx: Tensor | Sequence[Tensor], _params: Any, *flags: Any) -> tuple[Tensor, ...]:
    """Return results with the shapes of a recurrent network's results, without computing it."""
    states = (hx,) if isinstance(hx, Tensor) else hx
    bidirectional = flags[4]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty((*x.shape[:-1], width)), *(torch.empty_like(s) for s in states))


def _make_taken(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Return a tensor of the shape of `take_along_dim`'s result, without computing it."""
    if dim is None:
        return x.new_empty((indices.numel(),))
    shape, own = [*torch.broadcast_shapes(x.narrow(dim, 0, 1).shape, indices.narrow(dim, 0, 1).shape)], dim % x.dim()
    return x.new_empty([*shape[:own], indices.shape[dim], *shape[own + 1 :]])


def _make_pooled(x: Tensor, *windows: Any, **options: Any) -> Tensor:
    """Return a tensor of the shape of `max_pool1d`'s result: that of windows of height 1."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = {**dict(zip(names, windows, strict=False)), **options}
    ceil_mode = given.pop("ceil_mode", False)
    heights = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    pairs = {name: [heights[name], *sizes] for name, sizes in given.items() if sizes}
    pooled, _ = aten.max_pool2d_with_indices.default(x.unsqueeze(-2), **pairs, ceil_mode=ceil_mode)
    return pooled.squeeze(-2)


SHAPE_ONLY_FORMS: dict[OpOverload, Callable[..., Any]] = {
    aten.lstm.input: _make_rnn_results,
    aten.gru.input: _make_rnn_results,
    aten.rnn_tanh.input: _make_rnn_results,
    aten.rnn_relu.input: _make_rnn_results,
    aten.max_pool1d.default: _make_pooled,
    aten.take_along_dim.default: _make_taken,
}
"""Shape-only replacements: PyTorch unrolls recurrent calls over the sequence, and reads the sizes of others."""


@contextlib.contextmanager
def _set_kernels(kernels: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    before = {overload: find_composite_kernel(overload) for overload in kernels}
    for overload, kernel in kernels.items():
        set_composite_kernel(overload, kernel)
    try:
        yield
    finally:
        for overload, kernel in before.items():
            set_composite_kernel(overload, kernel)


@contextlib.contextmanager
def replace_composites() -> Iterator[None]:
    """Register `PYTHON_FORMS` and `SHAPE_ONLY_FORMS` as kernels for fake tensors while the context lasts.

    The first ``scan`` or compiled function of a process imports inductor's decompositions, which would keep them.
    """
    replaced = {**PYTHON_FORMS, **SHAPE_ONLY_FORMS}
    plain = {overload: find_composite_kernel(overload) for overload in replaced}
    with import_in_context(INDUCTOR_DECOMPOSITIONS, lambda: _set_kernels(plain)), _set_kernels(replaced):
        yield
