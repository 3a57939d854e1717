"""From module to file: seconds and memory, against ``torch.onnx.export`` and against ``torch.export`` alone."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measuring import (
    Names,
    format_verdict,
    geometric_mean,
    median_ratio,
    read_peak_bytes,
    run_in_fresh_process,
    run_in_turn,
)
from benchmarks.models import MODELS, Model, Tiny
from clika_ref import ClikaCompileOptions, clika_compile
from clika_ref.core.registry import load_registry
from clika_ref.reporting.tables import print_table

TIME_LIMIT, FLOOR_LIMIT, MEMORY_LIMIT = 1 / 3, 1.5, 1.0
"""At most a third of torch.onnx.export's time, 1.5 times that of torch.export alone, and no more memory."""

FIGURES = {
    "time against torch.onnx.export": TIME_LIMIT,
    "processor time against torch.onnx.export": TIME_LIMIT,
    "time against torch.export and writing": FLOOR_LIMIT,
    "processor time against torch.export and writing": FLOOR_LIMIT,
    "peak memory against torch.onnx.export": MEMORY_LIMIT,
}
"""On a busy machine the processor's time is the one to trust; waiting for the disk is not in it."""

COLUMNS = ("model", "ours", "torch.onnx", "floor", "/onnx", "cpu /onnx", "/floor", "cpu /floor")
COLUMNS += ("peak", "its peak", "peak ratio", "our stages")

Inputs = dict[str, torch.Tensor]


def export_with_clika_ref(model: torch.nn.Module, small: Inputs, large: Inputs, path: Path) -> Any:
    """Compile and export; the comparison in the runtime, which the others do not make, is left out."""
    options = ClikaCompileOptions(compare_after_export=False)
    compiled = clika_compile(model, tracing_inputs=[small, large], clika_compile_options=options)
    compiled.clika_export(path)
    return compiled


def export_with_torch(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path) -> None:
    """Export with PyTorch's own exporter and its default options."""
    torch.onnx.export(model, (), path, kwargs=large, dynamo=True, dynamic_shapes=_dynamic(large), verbose=False)


def floor(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path, written: bytes = b"") -> None:
    """Trace, and write bytes that are known already: what any road through torch.export costs at least."""
    torch.export.export(model, (), large, dynamic_shapes=_dynamic(large), strict=False)
    path.write_bytes(written)


EXPORT_METHODS: dict[str, Callable[..., Any]] = {"ours": export_with_clika_ref, "theirs": export_with_torch}


def _dynamic(inputs: Inputs) -> dict[str, Any]:
    return {name: {0: torch.export.Dim.AUTO} for name in inputs}


def warm_up(folder: Path) -> None:
    """Go down every road with a tiny model."""
    for method in (*EXPORT_METHODS.values(), floor):
        method(Tiny().eval(), {"x": torch.randn(1, 3, 8, 8)}, {"x": torch.randn(2, 3, 8, 8)}, folder / "tiny.onnx")


def measure_time(model: Model, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of every round on each road, by the clock and of the processor, and those of our stages."""
    small, large = model.inputs(1), model.inputs(2)
    stages: list[dict[str, float]] = []
    processor: dict[str, list[float]] = {"ours": [], "theirs": [], "floor": []}
    path = folder / "ours.onnx"
    export_with_clika_ref(model.make(), small, large, path)
    written = path.read_bytes()

    def go(method: Callable[..., Any], name: str, **options: Any) -> float:
        made = model.make()
        target = folder / f"{name}.onnx"
        target.unlink(missing_ok=True)  # all write a new file: ours would keep the old one until the new one is whole
        start, busy = time.perf_counter(), time.process_time()
        result = method(made, small, large, target, **options)
        seconds = time.perf_counter() - start
        processor[name].append(time.process_time() - busy)
        if result is not None:
            stages.append(dict(result.timings))
        return seconds

    found = run_in_turn(
        {
            "ours": lambda: go(export_with_clika_ref, "ours"),
            "theirs": lambda: go(export_with_torch, "theirs"),
            "floor": lambda: go(floor, "floor", written=written),
        },
        rounds,
    )
    return {"clock": found, "processor": processor, "stages": stages}


def measure_memory(model: Model, method: str, folder: Path) -> dict[str, Any]:
    """Return by how much one road raises the peak of a process that holds the model and the inputs already."""
    small, large, made = model.inputs(1), model.inputs(2), model.make()
    gc.collect()
    before = read_peak_bytes()
    EXPORT_METHODS[method](made, small, large, folder / "model.onnx")
    return {"peak": read_peak_bytes() - before, "before": before}


def main(unit: str, name: str, option: str) -> dict[str, Any]:
    """Measure one model."""
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
    """Time and memory from module to file, against torch.onnx.export and against torch.export alone."""
    rows: list[tuple[Any, ...]] = []
    ratios: list[tuple[float, ...]] = []
    for name in names or MODELS:
        row, figures = _row(name, rounds)
        rows.append(row)
        ratios.append(figures)
        print(" | ".join(map(str, row)), flush=True)
    print_table(COLUMNS, rows, title="Module to file, dynamic batch; one process, in turn; peaks in fresh processes")
    for (label, limit), column in zip(FIGURES.items(), zip(*ratios, strict=True), strict=True):
        over = [f"{name} {figure:.2f}" for name, figure in zip(names or MODELS, column, strict=True) if figure > limit]
        verdict = format_verdict(geometric_mean(column), limit)
        print(f"Geometric mean of {label}: {verdict}; over it: {', '.join(over) or 'none'}")


def _row(name: str, rounds: int) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    found = run_in_fresh_process("benchmarks.export", "time", name, str(rounds))
    peaks = {
        method: run_in_fresh_process("benchmarks.export", "memory", name, method)["peak"]
        for method in ("ours", "theirs")
    }
    against = {
        other: [median_ratio(found[kind]["ours"], found[kind][other]) for kind in ("clock", "processor")]
        for other in ("theirs", "floor")
    }
    memory = peaks["ours"] / max(peaks["theirs"], 1)
    stages = {s: statistics.median(t[s] for t in found["stages"]) for s in found["stages"][0]}
    row = (
        name,
        *(f"{statistics.median(found['clock'][method]):.2f} s" for method in ("ours", "theirs", "floor")),
        *(f"{figure:.2f}" for figure in (*against["theirs"], *against["floor"])),
        *(f"{peaks[method] / 1e6:,.0f} MB" for method in ("ours", "theirs")),
        f"{memory:.2f}",
        ", ".join(f"{s} {t:.2f}" for s, t in stages.items()),
    )
    return row, (*against["theirs"], *against["floor"], memory)
