"""The OpenVINO core of the process, which reads and compiles models."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def core() -> Any:
    """Return the core, which is never freed. The runtime must be installed.

    The CPU plugin of each core installs a signal stack for the thread that creates it. With two cores, the one
    destroyed first frees its stack, but destroying the other makes it current again. The next signal, such as Ctrl-C,
    is then a segmentation fault. Observed in OpenVINO 2026.4 by tracing its calls of ``sigaltstack``.
    """
    import openvino  # noqa: PLC0415 - heavy, and the plugin must load without it

    return openvino.Core()
