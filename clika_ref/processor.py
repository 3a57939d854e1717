"""The processor that this runs on: on it depends which kernels a runtime takes, and so what they compute."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

INFO = Path("/proc/cpuinfo")

WIDE_SUMS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Flags of processors, as Linux calls them, that add up products of 8-bit integers in 32 bits."""

WIDE_VECTORS = "avx512f"
"""The flag of those with vectors of 512 bits."""


@functools.cache
def flags() -> frozenset[str]:
    """Return what this processor says that it can do, nothing where that cannot be read."""
    text = INFO.read_text(encoding="utf-8") if INFO.exists() else ""
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def name_of_processor() -> str:
    """Return what this processor is called, or at least of which kind it is."""
    text = INFO.read_text(encoding="utf-8") if INFO.exists() else ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.machine()


def is_arm() -> bool:
    """Whether this is an ARM processor of 64 bits."""
    return platform.machine().lower() in ("arm64", "aarch64")
