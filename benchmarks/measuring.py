"""Measure side by side: runs of several candidates in turn, fresh processes, and medians of ratios.

Other load on the machine then slows every candidate alike, so ratios are reliable even if seconds are not.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

BUNDLED = "aten,cleanup,onnxruntime,openvino,tensorrt,visualize"
"""The plugins whose work is measured."""


def run_in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every candidate once a round, each round starting with another one; return the seconds that each reported."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()  # garbage of one candidate must not be collected in the time of the next
            found[name].append(candidates[name]())
    return found


def measure_processor_seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call: on one thread its duration, less the time of other programs."""
    start = time.process_time()
    call()
    return time.process_time() - start


def median_ratio(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the median of the ratios of paired runs."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def geometric_mean(numbers: Iterable[float]) -> float:
    """Return the mean that treats 2 and 1/2 alike."""
    logarithms = [math.log(n) for n in numbers]
    return math.exp(sum(logarithms) / len(logarithms))


def run_in_fresh_process(module: str, *arguments: str, on_one_thread: bool = True) -> Any:
    """Run a module in an interpreter of its own; return the JSON in the last line of its output.

    By default it runs on one thread with the bundled plugins, because threads that compete for cores disturb the
    measurement. Use ``on_one_thread=False`` if the peers use as many threads as they like.
    """
    own = {"CLIKA_REF_QUIET": "1", "CLIKA_REF_PLUGINS": BUNDLED}
    own |= {"OMP_NUM_THREADS": "1"} if on_one_thread else {}
    environment = {**own, **os.environ}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - our own modules
    if done.returncode:
        msg = f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"
        raise RuntimeError(msg)
    return json.loads(done.stdout.splitlines()[-1])


def read_peak_bytes() -> int:
    """Return the peak memory of this process so far.

    A process starts with the peak of its parent, so measure in children of a small process.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes, except on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_verdict(value: float, limit: float) -> str:
    """Return a line that states whether a figure is within its limit."""
    return f"{value:.2f} of at most {limit:.2f}: {'reached' if value <= limit else 'MISSED'}"
