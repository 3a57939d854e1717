"""The autocast regions that a thread is in: a graph that holds the casts of some is computed outside all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that have autocast regions of their own."""


def surrounding_autocast() -> str:
    """Name the regions that this thread is in, such as ``cpu bfloat16``; "" outside all of them."""
    within = filter(torch.is_autocast_enabled, KINDS)
    return ", ".join(f"{kind} {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" for kind in within)


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Compute as outside all autocast regions."""
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, KINDS):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
