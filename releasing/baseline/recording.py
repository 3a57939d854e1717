"""Record all parts of a baseline in worker processes, and read and write its file."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from releasing.baseline.json_outputs import GROUPS, record_commands
from releasing.baseline.networks import NETWORKS, QUICK_NETWORKS
from releasing.baseline.signatures import record_signatures
from releasing.baseline.variants import record_network
from releasing.distributions import ROOT

WORKERS = 2

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # sums over threads depend on their number
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "CLIKA_REF_QUIET": "1",
}
"""Variables that every worker gets."""

VERSIONED_DISTRIBUTIONS = (
    "torch",
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "safetensors",
    "sympy",
    "typer",
)
"""Distributions to record the version of: each may change files or messages."""

CPU_FLAGS = ("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
"""Instructions by which PyTorch and the runtimes choose kernels, and ONNX Runtime's plugin the width of weights."""

Record = dict[str, Any]


def part_names(pattern: str = "*", *, is_quick: bool = False) -> list[str]:
    """Return the parts to record: all parts, or those of a quick run, filtered by wildcards.

    A wildcard without a slash is matched with the last word: ``lstm`` matches ``networks/lstm``.
    """
    names = ["signatures", *(f"commands/{group}" for group in GROUPS), *(f"networks/{name}" for name in NETWORKS)]
    if is_quick:
        names = ["signatures", "commands/linear", *(f"networks/{name}" for name in QUICK_NETWORKS)]
    return [n for n in names if fnmatch.fnmatch(n if "/" in pattern else n.rpartition("/")[2], pattern)]


def record(parts: Sequence[str], *, is_shown: bool = True) -> Record:
    """Record parts, each in a process of its own, so that none depends on earlier ones."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    started, found = time.perf_counter(), dict[str, Any]()
    with ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1) as pool:
        for number, (part, result) in enumerate(zip(parts, pool.map(record_part, parts), strict=True), 1):
            found[part] = result
            if is_shown:
                print(f"{number}/{len(parts)}  {time.perf_counter() - started:5.0f} s  {part}", file=sys.stderr)
    return {"header": describe_environment(), "parts": found}


def record_part(part: str) -> dict[str, Any]:
    """Record one part in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind, _, name = part.partition("/")
    match kind:
        case "networks":
            return record_network(NETWORKS[name])
        case "commands":
            return record_commands(name)
    return dict(record_signatures())


def describe_environment() -> dict[str, Any]:
    """Return the commit, the processor, and the versions of Python and libraries."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "processor": " ".join([platform.machine(), *_cpu_flags()]),
        "kernels of PyTorch": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in VERSIONED_DISTRIBUTIONS},
    }


def _cpu_flags() -> Iterator[str]:
    """Yield the `CPU_FLAGS` that Linux lists for the processor."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    known = {word for line in text.splitlines() if line.startswith("flags") for word in line.split()}
    yield from (flag for flag in CPU_FLAGS if flag in known)


def write_record(found: Record, path: Path) -> None:
    """Write a record as JSON with one line for each part, so that git shows which part changed."""
    parts = ",\n".join(f"{json.dumps(name)}:{_dump(part)}" for name, part in sorted(found["parts"].items()))
    header = json.dumps(found["header"], indent=1)
    path.write_text(f'{{"header": {header},\n"parts": {{\n{parts}\n}}}}\n', encoding="utf-8")


def read_record(path: Path) -> Record:
    """Read a file written by `write_record`."""
    return json.loads(path.read_text(encoding="utf-8"))


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
