"""The runtimes of the comparison: export methods for each, and opening of files on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from clika_ref_openvino.core import core

from benchmarks.ptq import openvino_methods, quantizers
from benchmarks.ptq.quantizers import ExportMethod

Run = Callable[[Mapping[str, Any]], list[np.ndarray]]
"""Takes arrays by the names of inputs; returns all outputs."""


@dataclass(frozen=True)
class Runtime:
    """A runtime, and the export methods for it."""

    methods: Mapping[str, ExportMethod]
    suffix: str
    open: Callable[[Path, int | None], Run]
    """Opens a file for some threads; None for the runtime's default."""
    max_peer_ratio: float
    """Limit of clika-ref's latency relative to the fastest peer."""


FLOAT, TRACE_AND_FORWARD = "fp32", "trace and forward"
"""Methods that do not quantize. The second one writes an empty file."""

CLIKA_REF, CLIKA_REF_FOR_LATENCY = "clika-ref", "clika-ref, for latency"
"""With default settings, and with ``optimize_for="latency"``, which only small models use."""


def list_peers(runtime: str) -> tuple[str, ...]:
    """Return the methods of other libraries that quantize."""
    others = (FLOAT, TRACE_AND_FORWARD, CLIKA_REF, CLIKA_REF_FOR_LATENCY)
    return tuple(name for name in RUNTIMES[runtime].methods if name not in others)


def _open_in_onnxruntime(path: Path, threads: int | None = 1) -> Run:
    import onnxruntime  # noqa: PLC0415 - listing the methods needs no runtime

    options = onnxruntime.SessionOptions()
    if threads:
        options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def _open_in_openvino(path: Path, threads: int | None = 1) -> Run:
    options = {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
    request = core().compile_model(str(path), "CPU", options).create_infer_request()

    def run(feed: Mapping[str, Any]) -> list[np.ndarray]:
        found = request.infer(feed)
        return [np.array(found[i]) for i in range(len(found))]

    return run


RUNTIMES: dict[str, Runtime] = {
    "onnxruntime": Runtime(
        {
            FLOAT: quantizers.export_float,
            TRACE_AND_FORWARD: quantizers.trace_and_run,
            CLIKA_REF: quantizers.export_with_clika_ref,
            CLIKA_REF_FOR_LATENCY: partial(quantizers.export_with_clika_ref, optimize_for="latency"),
            "ort-default": quantizers.export_with_ort_default,
            "ort-best": quantizers.export_with_ort_best,
            "ort-dynamic": quantizers.export_with_ort_dynamic,
            "nncf": quantizers.export_with_nncf,
        },
        ".onnx",
        _open_in_onnxruntime,
        1.05,
    ),
    "openvino": Runtime(
        {
            FLOAT: openvino_methods.export_float,
            TRACE_AND_FORWARD: quantizers.trace_and_run,
            CLIKA_REF: partial(quantizers.export_with_clika_ref, target="openvino"),
            "nncf": openvino_methods.export_with_nncf,
            "nncf-transformer": partial(openvino_methods.export_with_nncf, for_transformers=True),
        },
        ".xml",
        _open_in_openvino,
        1.0,
    ),
}
"""Runtimes by name."""
