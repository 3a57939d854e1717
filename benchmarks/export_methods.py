"""Export a model by one method, in its own process."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measuring import in_turn, peak_bytes
from benchmarks.models import MODELS, Model, Tiny
from clika_ref import ClikaCompileOptions, clika_compile
from clika_ref.core.registry import load_registry

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

    found = in_turn(
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
    before = peak_bytes()
    EXPORT_METHODS[method](made, small, large, folder / "model.onnx")
    return {"peak": peak_bytes() - before, "before": before}


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
