"""Private names of `torch.func` for rules that map a call over a batch dim."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._functorch import _add_batch_dim, _unwrap_batched, maybe_current_level

from clika_ref.torch_internals.operators import OpOverload


def split_batch_dim(x: Any) -> tuple[Any, int | None]:
    """Return the tensor without its innermost batch dim, and that dim; None if the current `torch.vmap` adds none."""
    return _unwrap_batched(x, _find_level()) if isinstance(x, torch.Tensor) else (x, None)


def add_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose first dim is the batch dim of the current `torch.vmap`."""
    return _add_batch_dim(x, 0, _find_level())


def _find_level() -> int:
    level = maybe_current_level()
    assert level is not None, "a batching rule is called outside torch.vmap"
    return level


def outside_batches() -> contextlib.AbstractContextManager[Any]:
    """Return a context whose calls are those of the level around the current `torch.vmap`."""
    return _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.FuncTorchBatched))


def call_own_rule(overload: OpOverload, *args: Any) -> Any:
    """Call PyTorch's own batching rule of a call, as if `replace_batching_rule` had not replaced it."""
    with _set_rule(overload, None):
        return overload(*args)


def replace_batching_rule(overload: OpOverload, rule: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a function maps a call over batch dims."""
    return _set_rule(overload, rule)


@contextlib.contextmanager
def _set_rule(overload: OpOverload, rule: Callable[..., Any] | None) -> Iterator[None]:
    kernels = overload.py_kernels
    before = kernels.pop(DispatchKey.FuncTorchBatched, None)
    kernels.update({} if rule is None else {DispatchKey.FuncTorchBatched: rule})
    overload._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.pop(DispatchKey.FuncTorchBatched, None)
        kernels.update({} if before is None else {DispatchKey.FuncTorchBatched: before})
        overload._dispatch_cache.clear()
