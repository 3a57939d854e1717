"""OpenVINO's core, which reads and compiles models: one for the whole process."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def core() -> Any:
    """Return the core, which is never freed; the runtime has to be installed.

    The CPU plugin of each core gives the thread that makes it a stack to handle signals on. Of two cores, the one that
    goes first frees its stack though the other one's end makes it current again, and the next signal, such as that of
    Ctrl-C, is a segmentation fault. Seen in OpenVINO 2026.4, by tracing its calls of ``sigaltstack``.
    """
    import openvino  # noqa: PLC0415 - heavy, and the plugin must load without it

    return openvino.Core()
