"""Measure side by side: runs of several candidates in turn, fresh processes, and medians of ratios.

Whatever else the machine does hits every candidate alike that way, so ratios hold where seconds do not.
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
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent

BUNDLED = "aten,cleanup,onnxruntime,openvino,tensorrt,visualize"
"""The plugins whose work is measured."""


CALL_MAIN_PROGRAM = """
import importlib, json, sys
print(json.dumps(importlib.import_module(sys.argv[1]).main(*sys.argv[2:])))
"""

Names = Annotated[list[str] | None, typer.Argument(help="Only these rows; by default all.")]


def run_in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every candidate once a round, each round starting with another one; return the seconds that each reported."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()  # what one candidate leaves behind must not be cleared up in the time of the next
            found[name].append(candidates[name]())
    return found


def measure_processor_seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call: on one thread its duration, less what other programs take."""
    start = time.process_time()
    call()
    return time.process_time() - start


def median_ratio(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the median of the ratios of runs that stood beside each other."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def geometric_mean(numbers: Iterable[float]) -> float:
    """Return the mean that treats 2 and 1/2 alike."""
    logarithms = [math.log(n) for n in numbers]
    return math.exp(sum(logarithms) / len(logarithms))


def run_in_fresh_process(module: str, *arguments: str, on_one_thread: bool = True) -> Any:
    """Call ``main`` of a module in an interpreter of its own; return its result, passed as JSON.

    On one thread and with the bundled plugins, unless the environment says otherwise: threads that fight over cores
    measure the fight. Where peers take as many as they like, so may we: ``on_one_thread=False``.
    """
    own = {"CLIKA_REF_QUIET": "1", "CLIKA_REF_PLUGINS": BUNDLED}
    own |= {"OMP_NUM_THREADS": "1"} if on_one_thread else {}
    environment = {**own, **os.environ}
    command = [sys.executable, "-W", "ignore", "-c", CALL_MAIN_PROGRAM, module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - our own modules
    if done.returncode:
        raise RuntimeError(f"{' '.join([module, *arguments])} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def read_peak_bytes() -> int:
    """Return the most memory that this process has held so far.

    A process starts with the peak of the one that started it, so measure in children of one that stays small.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes, except on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_verdict(value: float, limit: float) -> str:
    """Say whether a figure is reached."""
    return f"{value:.2f} of at most {limit:.2f}: {'reached' if value <= limit else 'MISSED'}"
