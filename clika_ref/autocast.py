"""The autocast regions that a thread is in: a graph that holds the casts of some is computed outside all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that have autocast regions of their own."""


def surrounding_autocast() -> str:
    """Name the regions that this thread is in, such as ``cpu bfloat16``; "" outside all of them."""
    return ", ".join(f"{k} {str(torch.get_autocast_dtype(k)).removeprefix('torch.')}" for k in KINDS if _is_within(k))


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Compute as outside all autocast regions."""
    with contextlib.ExitStack() as stack:
        for kind in filter(_is_within, KINDS):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_within(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)
