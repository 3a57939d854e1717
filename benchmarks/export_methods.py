"""Export a model by one method, in its own process: ``python -m benchmarks.export_methods time resnet18 3``."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measuring import read_peak_bytes, run_in_turn
from benchmarks.models import MODELS, Model
from clika_ref import ClikaCompileOptions, clika_compile
from clika_ref.core.registry import load_registry

Inputs = dict[str, torch.Tensor]


def export_with_clika_ref(model: torch.nn.Module, small: Inputs, large: Inputs, path: Path) -> Any:
    """Compile and export without the comparison in the runtime, which the other methods do not make."""
    options = ClikaCompileOptions(compare_after_export=False)
    compiled = clika_compile(model, tracing_inputs=[small, large], clika_compile_options=options)
    compiled.clika_export(path)
    return compiled


def export_with_torch(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path) -> None:
    """Export with PyTorch's own exporter and its default options."""
    torch.onnx.export(model, (), path, kwargs=large, dynamo=True, dynamic_shapes=_dynamic(large), verbose=False)


def write_floor_artifact(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path, written: bytes = b"") -> None:
    """Trace, and write given bytes: the least cost of any method that uses torch.export."""
    torch.export.export(model, (), large, dynamic_shapes=_dynamic(large), strict=False)
    path.write_bytes(written)


EXPORT_METHODS: dict[str, Callable[..., Any]] = {"clika-ref": export_with_clika_ref, "torch.onnx": export_with_torch}


def _dynamic(inputs: Inputs) -> dict[str, Any]:
    return {name: {0: torch.export.Dim.AUTO} for name in inputs}


class _Tiny(torch.nn.Module):
    """Warms up both methods, so that neither is charged for imports and first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu().mean((2, 3))


def warm_up(folder: Path) -> None:
    """Run every method with a tiny model."""
    for method in (*EXPORT_METHODS.values(), write_floor_artifact):
        method(_Tiny().eval(), {"x": torch.randn(1, 3, 8, 8)}, {"x": torch.randn(2, 3, 8, 8)}, folder / "tiny.onnx")


def measure_time(model: Model, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the wall and processor seconds of every round of each method, and those of clika-ref's stages."""
    small, large = model.inputs(1), model.inputs(2)
    stages: list[dict[str, float]] = []
    processor: dict[str, list[float]] = {"clika-ref": [], "torch.onnx": [], "floor": []}
    path = folder / "clika-ref.onnx"
    export_with_clika_ref(model.make(), small, large, path)
    written = path.read_bytes()

    def go(method: Callable[..., Any], name: str, **options: Any) -> float:
        made = model.make()
        target = folder / f"{name}.onnx"
        target.unlink(
            missing_ok=True
        )  # all write a new file: clika-ref would keep the old one until the new one is complete
        start, busy = time.perf_counter(), time.process_time()
        result = method(made, small, large, target, **options)
        seconds = time.perf_counter() - start
        processor[name].append(time.process_time() - busy)
        if result is not None:
            stages.append(dict(result.timings))
        return seconds

    found = run_in_turn(
        {
            "clika-ref": lambda: go(export_with_clika_ref, "clika-ref"),
            "torch.onnx": lambda: go(export_with_torch, "torch.onnx"),
            "floor": lambda: go(write_floor_artifact, "floor", written=written),
        },
        rounds,
    )
    return {"clock": found, "processor": processor, "stages": stages}


def measure_memory(model: Model, method: str, folder: Path) -> dict[str, Any]:
    """Return how much one method raises the peak memory of a process with the model and the inputs."""
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


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
