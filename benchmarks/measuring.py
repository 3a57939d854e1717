"""Compare candidates: run them in turn or in fresh processes, and take the median of their ratios.

Other load on the machine slows all candidates equally. Ratios are therefore reliable even if seconds are not.
"""

from __future__ import annotations

import compileall
import functools
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent

BUNDLED_PLUGINS = "aten,cleanup,onnxruntime,openvino,tensorrt,torchvision,visualize"
"""The plugins that benchmarks load."""

MEASURED_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CLIKA_REF_QUIET": "1", "CLIKA_REF_PLUGINS": BUNDLED_PLUGINS}
"""The environment variables of a process that is measured on one thread."""

CALL_MAIN_PROGRAM = """
import importlib, json, sys
print(json.dumps(importlib.import_module(sys.argv[1]).main(*sys.argv[2:])))
"""

Names = Annotated[list[str] | None, typer.Argument(help="Only these rows; by default all.")]


def run_in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all candidates in each round, starting with a different one; return the seconds that each call returned."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()  # otherwise the garbage of one candidate is collected in the time of the next
            found[name].append(candidates[name]())
    return found


def measure_processor_seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call: on one thread, its duration without the time of other programs."""
    start = time.process_time()
    call()
    return time.process_time() - start


def median_ratio(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the median of the ratios of paired runs."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


@functools.cache
def _compile_bytecode() -> None:
    """Write the bytecode of all sources that have changed. An editable installation has none at first."""
    for folder in ("clika_ref", "plugins", "benchmarks"):
        compileall.compile_dir(ROOT / folder, quiet=1)


def run_in_fresh_process(module: str, *arguments: str, on_one_thread: bool = True) -> Any:
    """Call ``main`` of a module in an interpreter of its own; return its result, passed as JSON.

    The process uses one thread and the bundled plugins, unless the environment sets others. Threads that compete for
    cores would disturb the measurement. With ``on_one_thread=False``, each library uses its default number of threads.
    The project is compiled to bytecode first, as pip compiles a package that it installs.
    """
    _compile_bytecode()
    own = {"CLIKA_REF_QUIET": "1", "CLIKA_REF_PLUGINS": BUNDLED_PLUGINS}
    own |= {"OMP_NUM_THREADS": "1"} if on_one_thread else {}
    environment = {**own, **os.environ}
    command = [sys.executable, "-W", "ignore", "-c", CALL_MAIN_PROGRAM, module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - our own modules
    if done.returncode:
        call = " ".join([module, *arguments])
        raise RuntimeError(f"{call}: the process exited with {done.returncode}.\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def reset_peak_bytes() -> int:
    """Reset the peak memory of this process to its present memory, and return that.

    The peak includes imports and the building of models before, and that of the parent process. Only Linux can reset
    it: elsewhere it stays, and measurements give lower increases.
    """
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return read_peak_bytes()


def read_peak_bytes() -> int:
    """Return the peak memory of this process since `reset_peak_bytes`, or so far."""
    if sys.platform == "linux":  # getrusage keeps the peak before the reset
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def format_verdict(value: float, limit: float, *, digits: int = 2) -> str:
    """Return a figure with its limit, and whether it is within the limit."""
    return f"{value:.{digits}f}, limit {limit:.{digits}f}: {'met' if value <= limit else 'NOT MET'}"
