"""The host CPU: it determines the kernels that a runtime chooses, and so their results."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

CPUINFO_PATH = Path("/proc/cpuinfo")

INT32_ACCUMULATION_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""CPU flags, by their Linux names, of instructions that accumulate products of INT8 in 32 bits."""

AVX512_FLAG = "avx512f"
"""CPU flag of 512-bit vectors."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the feature flags of this CPU, empty if they cannot be read."""
    text = CPUINFO_PATH.read_text(encoding="utf-8") if CPUINFO_PATH.exists() else ""
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def cpu_name() -> str:
    """Return the model name of this CPU, or at least its architecture."""
    text = CPUINFO_PATH.read_text(encoding="utf-8") if CPUINFO_PATH.exists() else ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.machine()


def cpu_class() -> str:
    """Return the class of this CPU in tables of measured times: by the instructions for INT8."""
    if is_arm():
        return "arm"
    return "x86-vnni" if cpu_flags() & INT32_ACCUMULATION_FLAGS else "x86"


def is_arm() -> bool:
    """Return whether this is a 64-bit ARM CPU."""
    return platform.machine().lower() in ("arm64", "aarch64")
