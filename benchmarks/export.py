"""Compare time and memory of an export with ``torch.onnx.export`` and with ``torch.export``, from cold processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.export_measurement import CLIKA_REF, METHODS, TORCH_EXPORT, TORCH_ONNX
from benchmarks.measuring import Names, format_verdict, median_ratio, run_in_fresh_process
from benchmarks.models import MODELS
from clika_ref.reporting.tables import print_table

MAX_MEAN_TIME_RATIO, MAX_TIME_RATIO, MAX_MEMORY_RATIO = 0.5, 0.8, 1.03
"""Limits relative to torch.onnx.export: geometric mean of the time, and time and peak memory of each model."""

COLUMNS = (
    "model",
    *(f"{method}, whole process" for method in METHODS),
    "/ onnx",
    "cpu / onnx",
    "/ trace",
    "peak",
    "peak of onnx",
    "peak ratio",
    "stages of clika-ref, s",
)

Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of `benchmarks.export_measurement` for each round, by method."""


def run(names: Names = None, rounds: int = 3) -> None:
    """Compare time and memory of an export with torch.onnx.export and with torch.export, each from a cold process."""
    rows: list[tuple[Any, ...]] = []
    ratios: dict[str, tuple[float, float]] = {}
    for name in names or MODELS:
        measured = _measure(name, rounds)
        ratios[name] = (_ratio(measured, "seconds"), _ratio(measured, "peak"))
        rows.append(_make_row(name, measured))
        print(" | ".join(map(str, rows[-1])), flush=True)
    title = "Module to file, dynamic batch, default arguments and threads; in turn, each in a fresh process"
    print_table(COLUMNS, rows, title=title)
    times, peaks = zip(*ratios.values(), strict=True)
    mean = statistics.geometric_mean(times)
    print(f"Geometric mean of the time to {TORCH_ONNX}: {format_verdict(mean, MAX_MEAN_TIME_RATIO)}")
    print(f"Largest ratio of the time to {TORCH_ONNX}: {format_verdict(max(times), MAX_TIME_RATIO)}")
    print(f"Largest ratio of the peak memory to {TORCH_ONNX}: {format_verdict(max(peaks), MAX_MEMORY_RATIO)}")


def _measure(name: str, rounds: int) -> Measured:
    """Run each method in each round, starting with a different one."""
    measured: dict[str, list[Any]] = {method: [] for method in METHODS}
    methods = list(METHODS)
    with TemporaryDirectory() as folder:
        for number in range(rounds):
            start = number % len(methods)
            for method in methods[start:] + methods[:start]:
                clock = time.perf_counter()
                found = run_in_fresh_process("benchmarks.export_measurement", name, method, folder, on_one_thread=False)
                measured[method].append({**found, "process": time.perf_counter() - clock})
    return measured


def _ratio(measured: Measured, figure: str, other: str = TORCH_ONNX) -> float:
    first, second = ([found[figure] for found in measured[method]] for method in (CLIKA_REF, other))
    return median_ratio(first, second)


def _make_row(name: str, measured: Measured) -> tuple[Any, ...]:
    peaks = [min(found["peak"] for found in measured[method]) for method in (CLIKA_REF, TORCH_ONNX)]
    stages = [found["stages"] for found in measured[CLIKA_REF]]
    medians = {stage: statistics.median(times[stage] for times in stages) for stage in stages[0]}
    return (
        name,
        *(
            ", ".join(f"{statistics.median(m[figure] for m in found):.2f} s" for figure in ("seconds", "process"))
            for found in measured.values()
        ),
        f"{_ratio(measured, 'seconds'):.2f}",
        f"{_ratio(measured, 'processor'):.2f}",
        f"{_ratio(measured, 'seconds', TORCH_EXPORT):.2f}",
        *(f"{peak / 1e6:,.0f} MB" for peak in peaks),
        f"{_ratio(measured, 'peak'):.2f}",
        ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in medians.items()),
    )
