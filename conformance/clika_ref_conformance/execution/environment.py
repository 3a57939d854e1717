"""Environment of a run: versions, the processor, and environment variables that affect numerics."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import torch

from clika_ref_conformance.suite import Suite

REPORTED_LIBRARIES = ("torch", "numpy", "onnx", "onnxscript", "hypothesis", "clika-ref", "clika-ref-conformance")
REPORTED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "CUDA_VISIBLE_DEVICES",
    "CLIKA_REF_PLUGINS",
    "PYTHONHASHSEED",
)


def collect_environment(suite: Suite) -> dict[str, str]:
    """Return facts by name, as text, for a report."""
    plugins = {p.distribution: p.version for p in suite.registry.plugins}
    libraries: dict[str, str] = {}
    for name in (*REPORTED_LIBRARIES, *_find_runtime_libraries(suite)):
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    variables = {f"${name}": os.environ[name] for name in REPORTED_VARIABLES if name in os.environ}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _find_processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "suite": compute_suite_hash(),
        "limits": f"{suite.profile.case_seconds:g} s, {suite.profile.memory_bytes / 2**30:g} GiB",
        **libraries,
        **plugins,
        **variables,
    }


def compute_suite_hash() -> str:
    """Return a hash of the suite's own sources: two reports with the same hash ran the same checks."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _find_runtime_libraries(suite: Suite) -> list[str]:
    """Return the libraries that the target's plugin requires."""
    module = type(suite.target).__module__.partition(".")[0]
    names = [module]
    for found in distributions():
        if found.metadata["Name"].replace("-", "_") == module:
            names += [m.group() for r in found.requires or () if (m := re.match(r"[\w.-]+", r)) and "extra ==" not in r]
    return names


def _find_processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1) if found else platform.machine()
