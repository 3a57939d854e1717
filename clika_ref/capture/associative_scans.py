"""Associative scans of any length, by doubling: PyTorch's own form specializes on the depth of its recursion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.torch_internals.operators import ASSOCIATIVE_SCAN_MODULE, while_loop
from clika_ref.torch_internals.trees import pytree

Combine = Callable[..., Any]
"""Combines the leaves of two batches of elements, along dim 0, to a structure of tensors."""


def scan_by_doubling(
    combine: Combine, leaves: Sequence[Tensor], dim: int = 0, additional_inputs: Sequence[Any] = ()
) -> list[Tensor]:
    """Return the combination of all elements up to each, along dim 0 of the leaves.

    Each round combines every element with the one ``step`` before it, and doubles the step: a fixed length needs
    log2(length) rounds of slices, a dynamic one a loop.

    Source: Hillis and Steele, Data Parallel Algorithms (1986)
    """
    assert dim == 0
    assert not additional_inputs
    length = leaves[0].shape[0]
    return _unroll(combine, leaves, length) if isinstance(length, int) else _loop(combine, leaves)


def _unroll(combine: Combine, leaves: Sequence[Tensor], length: int) -> list[Tensor]:
    found, step = list(leaves), 1
    while step < length:
        later = pytree.tree_leaves(combine(*(x[:-step] for x in found), *(x[step:] for x in found)))
        found = [torch.cat([x[:step], new]) for x, new in zip(found, later, strict=True)]
        step *= 2
    return found


def _loop(combine: Combine, leaves: Sequence[Tensor]) -> list[Tensor]:
    positions = torch.arange(leaves[0].shape[0], device=leaves[0].device)

    def is_open(step: Tensor, *found: Tensor) -> Tensor:
        return step < found[0].shape[0]

    def combine_once(step: Tensor, *found: Tensor) -> tuple[Tensor, ...]:
        before = (positions - step).clamp(min=0)
        combined = pytree.tree_leaves(combine(*(x.index_select(0, before) for x in found), *found))
        kept = [(positions < step).reshape(-1, *[1] * (x.dim() - 1)) for x in found]
        chosen = (torch.where(k, x, new) for k, x, new in zip(kept, found, combined, strict=True))
        return step * 2, *chosen

    _, *found = while_loop(is_open, combine_once, (torch.ones((), dtype=torch.int64), *leaves))
    return list(found)


@contextlib.contextmanager
def trace_associative_scans() -> Iterator[None]:
    """Replace PyTorch's form of associative scans by `scan_by_doubling` while the context lasts."""
    plain = ASSOCIATIVE_SCAN_MODULE.generic_associative_scan
    own = only_in_this_thread(scan_by_doubling, plain)
    with patch_attributes({(ASSOCIATIVE_SCAN_MODULE, "generic_associative_scan"): own}):
        yield
