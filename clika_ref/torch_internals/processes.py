"""Process groups."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist


def read_timeout() -> timedelta:
    """Return the timeout of the user's process group."""
    group = dist.distributed_c10d._get_default_group()
    return max(group._get_backend(device).options._timeout for device in group._device_types)
