"""Measure one entry, in this process: compile it, compare module and file with eager, and quantize it."""

from __future__ import annotations

import copy
import logging
import resource
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# isort: split
import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.breadth.architecture import Architecture, Arguments
from benchmarks.breadth.catalogue import find_architecture
from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.capture.detections import has_same_detections
from clika_ref.core.artifacts import Artifact
from clika_ref.core.comparison import describe_differences
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry

MAX_BYTES = 6 * 2**30
"""Limit of the memory of an entry."""

CALIBRATION_BATCHES = 8

MAX_MESSAGE = 160


def main(name: str) -> dict[str, Any]:
    """Return the figures of one entry, as far as it comes; ``status`` is ``yes`` or the step that failed."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    found: dict[str, Any] = {"status": "build"}
    try:
        _measure(find_architecture(name), found)
    except Exception as error:  # noqa: BLE001 - the list contains every failure
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]
    return found


def _measure(architecture: Architecture, found: dict[str, Any]) -> None:
    """Fill in the figures one by one; ``status`` names the step that runs."""
    model = architecture.build().eval()
    *traced, unseen = (architecture.inputs(*sizes) for sizes in (*architecture.sizes[0], architecture.sizes[1]))
    found["status"] = "eager"
    expected = _call(copy.deepcopy(model), unseen)  # it may change its state
    found["status"], start = "compile", time.perf_counter()
    module = clika_compile(model, tracing_inputs=traced, discard_input_model=False)
    found["nodes"], found["status"] = len(module.graph), "module"
    graph = module.graph
    found["module"] = _count_roundings(graph, expected, _list_tensors(_call(copy.deepcopy(module), unseen)))
    found["status"] = "export"
    with tempfile.TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx")
        found["seconds"] = round(time.perf_counter() - start, 1)
        found["status"] = "file"
        found["file"] = _count_roundings(graph, expected, _run(artifact, module, unseen))
    found["status"] = "yes"
    try:
        found["decibels"] = _measure_int8(architecture, model)
    except Exception as error:  # noqa: BLE001 - as above
        found["int8_reason"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]


def _measure_int8(architecture: Architecture, model: torch.nn.Module) -> float | None:
    """Return the median SQNR of the samples of the quantized file in dB; None if it has no layer to quantize."""
    first, second = architecture.sizes[0]
    data = [architecture.inputs(*sizes) for sizes in (first, second) * (CALIBRATION_BATCHES // 2)]
    unseen = architecture.inputs(*architecture.sizes[1])
    expected = _list_tensors(_call(copy.deepcopy(model), unseen))
    module = clika_compile(
        model,
        tracing_inputs=[architecture.inputs(*first), architecture.inputs(*second)],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
    )
    if all(layer.reason for layer in module.clika_summary().layers):
        return None
    with tempfile.TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx")
        return round(_compute_decibels(expected, _run(artifact, module, unseen)), 1)


@torch.no_grad()
def _call(model: torch.nn.Module, given: Arguments) -> Any:
    return model(**given) if isinstance(given, Mapping) else model(*given)


def _run(artifact: Artifact, module: ClikaModule, given: Arguments) -> list[Tensor]:
    """Return the tensors of a file's results."""
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    signature = module.clika_state.signature
    inputs = signature.graph_inputs(signature.flatten(args, kwargs))
    return list(load_registry().targets["onnxruntime"].load(artifact)(inputs))


def _list_tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _count_roundings(graph: Graph, expected: Any, found: Sequence[Tensor]) -> int | str:
    """Return the largest difference, in float32 roundings of the largest element of each result.

    It is "rows" if they are the same detections in another order.

    Raises:
        AssertionError: it exceeds the bound of the product, or a shape or an integer differs.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in _list_tensors(expected)]
    found = [torch.view_as_real(t) if t.is_complex() else t for t in found]
    assert len(found) == len(tensors), f"{len(found)} results instead of {len(tensors)}"
    differences = describe_differences(tensors, found)
    if differences and has_same_detections(graph, tensors, found):
        return "rows"
    assert not differences, "; ".join(differences.values())
    floats = [
        (e.double(), f.double()) for e, f in zip(tensors, found, strict=True) if e.is_floating_point() and e.numel()
    ]
    units = [torch.finfo(torch.float32).eps * float(e.nan_to_num(0, 0, 0).abs().max()) for e, _ in floats]
    errors = [float((e - f).nan_to_num(0, 0, 0).abs().max()) for e, f in floats]
    return round(max((error / unit for error, unit in zip(errors, units, strict=True) if unit), default=0))


def _compute_decibels(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the median over samples of the SQNR, over all float results with the batch as first dim."""
    pairs = [(e, f) for e, f in zip(expected, found, strict=True) if e.is_floating_point() and e.ndim]
    size = len(pairs[0][0])
    pairs = [(e, f) for e, f in pairs if len(e) == size]
    signal = sum(e.reshape(size, -1).double().square().sum(1) for e, _ in pairs)
    noise = sum((e - f).reshape(size, -1).double().square().sum(1) for e, f in pairs)
    return float(10 * (signal / noise).median().log10())
