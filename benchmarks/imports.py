"""Measure the time that ``import clika_ref`` adds to ``import torch``, and list lazy modules that it loads."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.measuring import ROOT, format_verdict, run_in_turn
from clika_ref.reporting.tables import print_table

MAX_ADDED_S = 0.3

LAZY_MODULES = ("onnx", "onnxruntime", "hypothesis", "onnx_ir", "onnxscript", "sympy")

STATEMENTS = {
    "torch": "import torch",
    "clika_ref": "import torch, clika_ref",
    "clika_compile": "import torch; from clika_ref import clika_compile",
    "command line": "from clika_ref_cli import cli",
}

PROGRAM = """
import sys, time
start = time.perf_counter()
{statement}
print(time.perf_counter() - start, *(m for m in {lazy_modules!r} if m in sys.modules))
"""


def run(rounds: int = 9) -> None:
    """Measure the time that the import adds to that of torch, and the time of the command line."""
    loaded: dict[str, str] = {}

    def measure_import(name: str) -> float:
        program = PROGRAM.format(statement=STATEMENTS[name], lazy_modules=LAZY_MODULES)
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - our own program
        seconds, *modules = done.stdout.split()
        loaded[name] = ", ".join(modules) or "none"
        return float(seconds)

    calls: dict[str, Callable[[], float]] = {name: partial(measure_import, name) for name in STATEMENTS}
    found = run_in_turn(calls, rounds)
    added = {
        name: statistics.median(a - b for a, b in zip(seconds, found["torch"], strict=True))
        for name, seconds in found.items()
    }
    rows = [
        (STATEMENTS[name], f"{statistics.median(found[name]):.3f} s", f"{added[name]:+.3f} s", loaded[name])
        for name in STATEMENTS
    ]
    print_table(("statement", "median", "added", f"loaded, of {', '.join(LAZY_MODULES)}"), rows, title="Import")
    for name in ("clika_ref", "clika_compile"):
        print(f"{STATEMENTS[name]}: seconds added to torch: {format_verdict(added[name], MAX_ADDED_S)}")
    total = statistics.median(found["command line"])
    print(f"{STATEMENTS['command line']}: seconds, without torch: {format_verdict(total, MAX_ADDED_S)}")
