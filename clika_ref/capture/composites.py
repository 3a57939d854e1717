"""PyTorch's composite calls whose own code fixes sizes: how they are traced and taken apart instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _kron(x: Tensor, other: Tensor) -> Tensor:
    """``result[i * k + j] = x[i] * other[j]`` along each side; the shorter shape is filled up with ones in front."""
    rank = max(x.dim(), other.dim())
    shapes = [[1] * (rank - t.dim()) + list(t.shape) for t in (x, other)]
    left = x.reshape([n for side in shapes[0] for n in (side, 1)])
    right = other.reshape([n for side in shapes[1] for n in (1, side)])
    return (left * right).reshape([a * b for a, b in zip(*shapes, strict=True)])


def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: FBT001, FBT002, N803 - ATen's
    """Powers ``x[i] ** j`` as columns, the highest first unless ``increasing``; eager multiplies them up in turn."""
    count = x.shape[0] if N is None else N
    wide = x.to(torch.promote_types(x.dtype, torch.int64 if not x.is_floating_point() else x.dtype))
    column = wide.unsqueeze(1)
    factors = torch.cat([torch.ones_like(column), column.expand(-1, max(count - 1, 0))], 1)[:, :count]
    powers = factors.cumprod(1, dtype=wide.dtype)
    return powers if increasing else powers.flip(1)


FORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.kron.default: _kron,
    aten.vander.default: _vander,
}
"""The same in Python, for any size: PyTorch's own asks for each size as a number."""


def _recurrent(x: Tensor, hx: Tensor | Sequence[Tensor], _params: Any, *flags: Any) -> tuple[Tensor, ...]:
    """Return results of the shapes that a recurrent network returns, and nothing of what it computes."""
    states = (hx,) if isinstance(hx, Tensor) else hx
    bidirectional = flags[4]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty((*x.shape[:-1], width)), *(torch.empty_like(s) for s in states))


SHAPES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
}
"""What a trace needs to know: PyTorch unrolls them over the sequence, which fixes its length."""


@contextlib.contextmanager
def for_any_size() -> Iterator[None]:
    """Let fake tensors go through `FORMS` and `SHAPES`, for as long as the context lasts."""
    replaced = {**FORMS, **SHAPES}
    before = {overload: overload.py_kernels.get(COMPOSITE) for overload in replaced}
    for overload, form in replaced.items():
        _set(overload, form)
    try:
        yield
    finally:
        for overload, kernel in before.items():
            _set(overload, kernel)


def _set(overload: torch._ops.OpOverload, kernel: Callable[..., Any] | None) -> None:
    if kernel is None:
        overload.py_kernels.pop(COMPOSITE, None)
    else:
        overload.py_kernels[COMPOSITE] = kernel
    overload._dispatch_cache.clear()
