"""Query and leave autocast regions: a graph that contains its own casts runs outside all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Device types that have autocast regions."""


def surrounding_autocast() -> str:
    """Return the active autocast regions of this thread, such as ``cpu bfloat16``; "" outside all of them."""
    within = filter(torch.is_autocast_enabled, AUTOCAST_DEVICE_TYPES)
    return ", ".join(f"{kind} {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}" for kind in within)


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable all active autocast regions within the block."""
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, AUTOCAST_DEVICE_TYPES):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
