"""Compare the time and memory of an export with ``torch.onnx.export`` and with ``torch.export`` alone."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measuring import (
    Names,
    format_verdict,
    median_ratio,
    read_peak_bytes,
    run_in_fresh_process,
    run_in_turn,
)
from benchmarks.models import MODELS, Model, Tiny
from clika_ref import ClikaCompileOptions, clika_compile
from clika_ref.core.registry import load_registry
from clika_ref.reporting.tables import print_table

CLIKA_REF, TORCH_ONNX, TORCH_EXPORT = "clika-ref", "torch.onnx.export", "torch.export"

MAX_ONNX_TIME_RATIO, MAX_TRACE_TIME_RATIO, MAX_MEMORY_RATIO = 1 / 3, 1.5, 1.0
"""Limits of the time relative to torch.onnx.export and to torch.export alone, and of the memory."""

RATIO_LIMITS = {
    "time to torch.onnx.export": MAX_ONNX_TIME_RATIO,
    "processor time to torch.onnx.export": MAX_ONNX_TIME_RATIO,
    "time to torch.export and writing": MAX_TRACE_TIME_RATIO,
    "processor time to torch.export and writing": MAX_TRACE_TIME_RATIO,
    "peak memory to torch.onnx.export": MAX_MEMORY_RATIO,
}
"""On a busy machine, processor time is the reliable one. It excludes waiting for the disk."""

COLUMNS = ("model", CLIKA_REF, TORCH_ONNX, TORCH_EXPORT, "/ onnx", "cpu / onnx", "/ trace", "cpu / trace")
COLUMNS += ("peak", "peak of onnx", "peak ratio", "stages of clika-ref, s")

Inputs = dict[str, torch.Tensor]


def export_with_clika_ref(model: torch.nn.Module, small: Inputs, large: Inputs, path: Path) -> Any:
    """Compile and export, without the comparison in the runtime, which PyTorch's exporter does not make."""
    options = ClikaCompileOptions(compare_after_export=False)
    compiled = clika_compile(model, tracing_inputs=[small, large], clika_compile_options=options)
    compiled.clika_export(path)
    return compiled


def export_with_torch(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path) -> None:
    """Export with PyTorch's exporter and its default options."""
    torch.onnx.export(
        model, (), path, kwargs=large, dynamo=True, dynamic_shapes=_make_dynamic_shapes(large), verbose=False
    )


def trace_and_write(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path, content: bytes = b"") -> None:
    """Trace, and write given bytes: a lower bound for every export that uses torch.export."""
    torch.export.export(model, (), large, dynamic_shapes=_make_dynamic_shapes(large), strict=False)
    path.write_bytes(content)


EXPORT_METHODS: dict[str, Callable[..., Any]] = {CLIKA_REF: export_with_clika_ref, TORCH_ONNX: export_with_torch}


def _make_dynamic_shapes(inputs: Inputs) -> dict[str, Any]:
    return {name: {0: torch.export.Dim.AUTO} for name in inputs}


def warm_up(folder: Path) -> None:
    """Run every method with a tiny model."""
    for method in (*EXPORT_METHODS.values(), trace_and_write):
        method(Tiny().eval(), {"x": torch.randn(1, 3, 8, 8)}, {"x": torch.randn(2, 3, 8, 8)}, folder / "tiny.onnx")


def measure_time(model: Model, rounds: int, folder: Path) -> dict[str, Any]:
    """Return wall-clock and processor seconds of each round and method, and those of clika-ref's stages."""
    small, large = model.inputs(1), model.inputs(2)
    stages: list[dict[str, float]] = []
    path = folder / "reference.onnx"
    export_with_clika_ref(model.make(), small, large, path)
    methods = EXPORT_METHODS | {TORCH_EXPORT: partial(trace_and_write, content=path.read_bytes())}
    processor: dict[str, list[float]] = {name: [] for name in methods}

    def export_once(name: str) -> float:
        module = model.make()
        target = folder / f"{name}.onnx"
        target.unlink(missing_ok=True)  # all write a new file: clika-ref would keep an old one until the end
        start, processor_start = time.perf_counter(), time.process_time()
        result = methods[name](module, small, large, target)
        seconds = time.perf_counter() - start
        processor[name].append(time.process_time() - processor_start)
        if result is not None:
            stages.append(dict(result.timings))
        return seconds

    clock = run_in_turn({name: partial(export_once, name) for name in methods}, rounds)
    return {"clock": clock, "processor": processor, "stages": stages}


def measure_memory(model: Model, method: str, folder: Path) -> dict[str, Any]:
    """Return how much one method raises the peak memory of a process that holds the model and the inputs."""
    small, large, module = model.inputs(1), model.inputs(2), model.make()
    gc.collect()
    before = read_peak_bytes()
    EXPORT_METHODS[method](module, small, large, folder / "model.onnx")
    return {"peak": read_peak_bytes() - before}


def main(unit: str, name: str, option: str) -> dict[str, Any]:
    """Measure the time of all methods on one model, or the memory of one method."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    load_registry()
    model = MODELS[name]()
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        warm_up(Path(folder))
        if unit == "time":
            return measure_time(model, int(option), Path(folder))
        return measure_memory(model, option, Path(folder))


def run(names: Names = None, rounds: int = 3) -> None:
    """Compare time and memory of an export with torch.onnx.export and with torch.export alone."""
    rows: list[tuple[Any, ...]] = []
    ratios: list[tuple[float, ...]] = []
    for name in names or MODELS:
        row, row_ratios = _measure_row(name, rounds)
        rows.append(row)
        ratios.append(row_ratios)
        print(" | ".join(map(str, row)), flush=True)
    print_table(COLUMNS, rows, title="Module to file, dynamic batch; in turn in one process; peaks in fresh processes")
    for (label, limit), column in zip(RATIO_LIMITS.items(), zip(*ratios, strict=True), strict=True):
        above = [f"{name} {ratio:.2f}" for name, ratio in zip(names or MODELS, column, strict=True) if ratio > limit]
        verdict = format_verdict(statistics.geometric_mean(column), limit)
        print(
            f"Geometric mean of the ratio of {label}: {verdict}; models above the limit: {', '.join(above) or 'none'}"
        )


def _measure_row(name: str, rounds: int) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    found = run_in_fresh_process("benchmarks.export", "time", name, str(rounds))
    peaks = {
        method: run_in_fresh_process("benchmarks.export", "memory", name, method)["peak"] for method in EXPORT_METHODS
    }
    time_ratios = [
        median_ratio(found[clock][CLIKA_REF], found[clock][other])
        for other in (TORCH_ONNX, TORCH_EXPORT)
        for clock in ("clock", "processor")
    ]
    memory_ratio = peaks[CLIKA_REF] / max(peaks[TORCH_ONNX], 1)
    stages = {s: statistics.median(t[s] for t in found["stages"]) for s in found["stages"][0]}
    row = (
        name,
        *(f"{statistics.median(seconds):.2f} s" for seconds in found["clock"].values()),
        *(f"{ratio:.2f}" for ratio in time_ratios),
        *(f"{peak / 1e6:,.0f} MB" for peak in peaks.values()),
        f"{memory_ratio:.2f}",
        ", ".join(f"{s} {t:.2f}" for s, t in stages.items()),
    )
    return row, (*time_ratios, memory_ratio)
