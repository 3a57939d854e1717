"""Measure one export of one model by one method, in a fresh process and with default arguments, as a user meets it.

The clock starts after the imports of torch, torchvision and the model, and its construction. It includes the imports of
the method itself, ``import clika_ref`` too, which is why this module imports nothing of it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import read_peak_bytes, reset_peak_bytes
from benchmarks.models import MODELS

# isort: split
import torch

CLIKA_REF, TORCH_ONNX, TORCH_EXPORT = "clika-ref", "torch.onnx.export", "torch.export"

Inputs = dict[str, torch.Tensor]


def export_with_clika_ref(model: torch.nn.Module, small: Inputs, large: Inputs, path: Path) -> dict[str, float]:
    """Compile and export, with the comparison in the runtime; return the seconds of each stage."""
    from clika_ref import clika_compile  # noqa: PLC0415 - the time of the import counts

    compiled = clika_compile(model, tracing_inputs=[small, large])
    compiled.clika_export(path)
    return dict(compiled.clika_state.timings)


def export_with_torch(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path) -> dict[str, float]:
    """Export with PyTorch's exporter and its default options, which compare nothing."""
    torch.onnx.export(
        model, (), path, kwargs=large, dynamo=True, dynamic_shapes=_make_dynamic_shapes(large), verbose=False
    )
    return {}


def trace_and_write(model: torch.nn.Module, _: Inputs, large: Inputs, path: Path) -> dict[str, float]:
    """Trace, and write as many bytes as the weights have: a lower bound for every export that uses torch.export."""
    torch.export.export(model, (), large, dynamic_shapes=_make_dynamic_shapes(large), strict=False)
    with path.open("wb") as file:
        for weight in model.parameters():
            file.write(weight.detach().numpy().data)
    return {}


METHODS: dict[str, Callable[..., dict[str, float]]] = {
    CLIKA_REF: export_with_clika_ref,
    TORCH_ONNX: export_with_torch,
    TORCH_EXPORT: trace_and_write,
}


def _make_dynamic_shapes(inputs: Inputs) -> dict[str, Any]:
    return {name: {0: torch.export.Dim.AUTO} for name in inputs}


def main(name: str, method: str, location: str) -> dict[str, Any]:
    """Return wall-clock and processor seconds, the increase in peak memory, and the seconds of each stage."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    model = MODELS[name]()
    small, large, module = model.inputs(1), model.inputs(2), model.make()
    path = Path(location) / "model.onnx"
    path.unlink(missing_ok=True)  # all write a new file: clika-ref would keep an old one until the end
    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        before, start, processor_start = reset_peak_bytes(), time.perf_counter(), time.process_time()
        stages = METHODS[method](module, small, large, path)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor_start
    return {"seconds": seconds, "processor": processor, "peak": read_peak_bytes() - before, "stages": stages}
