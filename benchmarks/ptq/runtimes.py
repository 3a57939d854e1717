"""The runtimes that files are measured in: their methods, and a function that opens a file for one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ptq import openvino_methods, quantizers
from benchmarks.ptq.quantizers import ExportMethod

Run = Callable[[Mapping[str, Any]], Any]
"""Takes arrays by the names of inputs; returns the first output."""


@dataclass(frozen=True)
class Runtime:
    """A runtime, and the methods that write its files."""

    methods: Mapping[str, ExportMethod]
    suffix: str
    open: Callable[[Path], Run]
    max_peer_ratio: float
    """The limit of clika-ref's time, as a multiple of the fastest peer's."""


FLOAT_METHODS = ("fp32", "floor")
"""Methods that quantize nothing; the second one writes no file."""

CLIKA_REF_METHOD, CLIKA_REF_LATENCY_METHOD = "clika-ref", "clika-ref, for latency"
"""The methods of clika-ref: default settings, and ``optimize_for="latency"``, which is only run with small nets."""


def select_peers(runtime: str) -> tuple[str, ...]:
    """Return the methods of other libraries."""
    return tuple(
        name
        for name in RUNTIMES[runtime].methods
        if name not in (*FLOAT_METHODS, CLIKA_REF_METHOD, CLIKA_REF_LATENCY_METHOD)
    )


def _open_in_onnxruntime(path: Path) -> Run:
    import onnxruntime  # noqa: PLC0415 - the names of methods need no runtime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)[0]


def _open_in_openvino(path: Path) -> Run:
    import openvino  # noqa: PLC0415 - as above

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    request = openvino.Core().compile_model(str(path), "CPU", options).create_infer_request()
    return lambda feed: np.array(request.infer(feed)[0])


RUNTIMES: dict[str, Runtime] = {
    "onnxruntime": Runtime(
        {
            "fp32": quantizers.export_floating,
            "floor": quantizers.export_floor,
            CLIKA_REF_METHOD: quantizers.export_with_clika_ref,
            CLIKA_REF_LATENCY_METHOD: quantizers.export_with_clika_ref_for_latency,
            "ort-default": quantizers.export_ort_default,
            "ort-best": quantizers.export_ort_best,
            "ort-dynamic": quantizers.export_ort_dynamic,
            "nncf": quantizers.export_nncf,
        },
        ".onnx",
        _open_in_onnxruntime,
        1.05,
    ),
    "openvino": Runtime(
        {
            "fp32": openvino_methods.export_floating,
            "floor": quantizers.export_floor,
            CLIKA_REF_METHOD: openvino_methods.export_with_clika_ref,
            "nncf": openvino_methods.export_nncf,
            "nncf-transformer": openvino_methods.export_nncf_transformer,
        },
        ".xml",
        _open_in_openvino,
        1.0,
    ),
}
"""By name."""
