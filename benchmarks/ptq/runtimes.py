"""The runtimes in which files are judged: which roads lead there, and how one opens a file, for one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ptq import openvino_methods, quantizers
from benchmarks.ptq.quantizers import ExportMethod

Run = Callable[[Mapping[str, Any]], Any]
"""Takes arrays by the names of inputs; returns the first output."""


@dataclass(frozen=True)
class Runtime:
    """A runtime, and the roads to it."""

    methods: Mapping[str, ExportMethod]
    suffix: str
    open: Callable[[Path], Run]
    max_peer_ratio: float
    """How many times as long as the fastest peer ours may take."""


FLOAT_METHODS = ("fp32", "floor")
"""Roads that quantize nothing; the second one writes no file."""

CLIKA_REF_METHOD, CLIKA_REF_LATENCY_METHOD = "ours", "ours, for latency"
"""Our roads: with the default settings, and with ``optimize_for="latency"``, which is only walked with small nets."""


def peers_of(runtime: str) -> tuple[str, ...]:
    """Return the roads of others."""
    return tuple(
        name
        for name in RUNTIMES[runtime].methods
        if name not in (*FLOAT_METHODS, CLIKA_REF_METHOD, CLIKA_REF_LATENCY_METHOD)
    )


def _in_onnxruntime(path: Path) -> Run:
    import onnxruntime  # noqa: PLC0415 - roads are told by their names without any runtime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)[0]


def _in_openvino(path: Path) -> Run:
    import openvino  # noqa: PLC0415 - as above

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    request = openvino.Core().compile_model(str(path), "CPU", options).create_infer_request()
    return lambda feed: np.array(request.infer(feed)[0])


RUNTIMES: dict[str, Runtime] = {
    "onnxruntime": Runtime(
        {
            "fp32": quantizers.floating,
            "floor": quantizers.floor,
            CLIKA_REF_METHOD: quantizers.export_with_clika_ref,
            CLIKA_REF_LATENCY_METHOD: partial(quantizers.export_with_clika_ref, optimize_for="latency"),
            "ort-default": quantizers.ort_default,
            "ort-best": quantizers.ort_best,
            "ort-dynamic": quantizers.ort_dynamic,
            "nncf": quantizers.nncf,
        },
        ".onnx",
        _in_onnxruntime,
        1.05,
    ),
    "openvino": Runtime(
        {
            "fp32": openvino_methods.floating,
            "floor": quantizers.floor,
            CLIKA_REF_METHOD: partial(quantizers.export_with_clika_ref, target="openvino"),
            "nncf": openvino_methods.nncf,
            "nncf-transformer": partial(openvino_methods.nncf, for_transformers=True),
        },
        ".xml",
        _in_openvino,
        1.0,
    ),
}
"""By name."""
