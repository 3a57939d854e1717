"""Measure one entry, in this process: compile it, compare module and file with eager, and quantize it."""

from __future__ import annotations

import copy
import json
import logging
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# isort: split
import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.breadth.architecture import Architecture, Arguments, set_statistics
from benchmarks.breadth.catalogue import find_architecture
from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.capture.detections import has_same_detections, list_row_groups
from clika_ref.core.artifacts import Artifact
from clika_ref.core.comparison import describe_differences
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.export.artifact_check import ROUNDING_TOLERANCE, is_within_rounding
from clika_ref.export.element_order import agrees_in_own_order

MAX_BYTES = 6 * 2**30
"""Limit of the memory of an entry."""

MAX_SECONDS = 120
"""Limit of the processor time of an entry. On one thread it is the duration, without the time of other programs."""

CALIBRATION_BATCHES = 8

MAX_MESSAGE = 160

SMALLEST_RESULT = 1e-6
"""Largest absolute element of results below which batch norms take the statistics of the input."""

SMALLEST_CHANGE = 1e-3
"""Largest change of results with the input, relative to their largest element, to which the same applies."""

WEIGHT_DEVIATION = 0.02
"""Standard deviation of weights in place of zeros."""

LARGEST_SMALL_SCALE = 0.1
"""Largest scale of a residual branch in place of which it is 1."""


def main(name: str, precision: str = "int8") -> dict[str, Any]:
    """Return the figures of one entry, as far as it comes; ``status`` is ``yes`` or the step that failed.

    Args:
        name: the entry.
        precision: ``float`` leaves out the quantized file.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    found: dict[str, Any] = {"status": "build"}
    try:
        architecture = find_architecture(name)
        model, module = _measure(architecture, found)
        if precision == "int8" and found["status"] == "yes":
            print(json.dumps(found), flush=True)  # the result if the limits end this process
            _measure_int8(architecture, model, module, found)
    except Exception as error:  # noqa: BLE001 - the list contains every failure
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]
    return found


def _measure(architecture: Architecture, found: dict[str, Any]) -> tuple[torch.nn.Module, ClikaModule]:
    """Fill in the figures in float one by one; ``status`` names the step that runs. Return model and module."""
    model = architecture.build().eval()
    _fill_small_weights(model)
    *traced, unseen = (architecture.inputs(*sizes) for sizes in (*architecture.sizes[0], architecture.sizes[1]))
    found["status"] = "eager"
    expected = _call(copy.deepcopy(model), unseen)  # it may change its state
    with torch.random.fork_rng():
        other = _call(copy.deepcopy(model), architecture.inputs(*architecture.sizes[1]))
    if _vanishes(expected, other):
        norms = [part for part in model.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
        set_statistics(norms, partial(_call, model, unseen))
        expected = _call(copy.deepcopy(model), unseen)
    is_random = not _are_equal(expected, _call(copy.deepcopy(model), unseen))
    found["status"], start = "compile", time.process_time()
    module = clika_compile(model, tracing_inputs=traced, discard_input_model=False)
    found["nodes"], found["status"] = len(module.graph), "module"
    result = _list_tensors(_call(copy.deepcopy(module), unseen))
    compare = partial(_compare_shapes if is_random else _count_roundings, module, unseen, expected)
    found["module"] = compare(result)
    found["status"] = "export"
    with tempfile.TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx")
        found["seconds"] = round(time.process_time() - start, 1)
        found["status"] = "file"
        found["file"] = compare(_run(artifact, module, unseen))
    found["status"] = "random" if is_random else "yes"
    if is_random:
        found["reason"] = "each call draws other numbers"
    return model, module


@torch.no_grad()
def _fill_small_weights(model: torch.nn.Module) -> None:
    """Fill weights that a model starts with as zeros or, in layer scales, almost as zeros.

    Its head or its residual branches would compute nothing.
    """
    for weight in model.parameters():
        if not weight.is_floating_point() or not weight.numel():
            continue
        if weight.ndim >= 2 and not weight.any():
            weight.normal_(std=WEIGHT_DEVIATION)
        elif weight.ndim == 1 and 0 < float(weight[0]) <= LARGEST_SMALL_SCALE and bool((weight == weight[0]).all()):
            weight.fill_(1)


def _vanishes(result: Any, other: Any) -> bool:
    """Whether the float results for two inputs are so small, or so close, that a comparison shows nothing."""
    pairs = zip(_list_tensors(result), _list_tensors(other), strict=True)
    floats = [(a, b) for a, b in pairs if a.is_floating_point() and a.numel()]
    if not floats or any(a.shape != b.shape for a, b in floats):
        return False
    largest = max(float(a.abs().max()) for a, _ in floats)
    change = max(float((a - b).abs().max()) for a, b in floats)
    return largest < SMALLEST_RESULT or change < SMALLEST_CHANGE * largest


def _measure_int8(
    architecture: Architecture, model: torch.nn.Module, module: ClikaModule, found: dict[str, Any]
) -> None:
    """Fill in the SQNR of the quantized file, or why there is none."""
    try:
        found["decibels"] = _compute_int8_decibels(architecture, model, module)
    except Exception as error:  # noqa: BLE001 - as above
        found["int8_reason"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]


def _compute_int8_decibels(architecture: Architecture, model: torch.nn.Module, module: ClikaModule) -> float | None:
    """Quantize the module, and return the median SQNR of its file in dB; None without a layer to quantize."""
    first, second = architecture.sizes[0]
    data = [architecture.inputs(*sizes) for sizes in (first, second) * (CALIBRATION_BATCHES // 2)]
    unseen = architecture.inputs(*architecture.sizes[1])
    expected = _list_tensors(_call(model, unseen))
    quantization = module.clika_initialize_algorithms(
        QuantizationSettings(), calibration_inputs=data, deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
    )
    if all(layer.reason for layer in quantization.layers):
        return None
    with tempfile.TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx")
        return round(_compute_decibels(module.graph, expected, _run(artifact, module, unseen)), 1)


@torch.no_grad()
def _call(model: torch.nn.Module, given: Arguments) -> Any:
    return model(**given) if isinstance(given, Mapping) else model(*given)


def _run(artifact: Artifact, module: ClikaModule, given: Arguments) -> list[Tensor]:
    """Return the tensors of a file's results."""
    return list(load_registry().targets["onnxruntime"].load(artifact)(_list_inputs(module, given)))


def _list_inputs(module: ClikaModule, given: Arguments) -> list[Tensor]:
    """Return the inputs of the graph for arguments of the model."""
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    signature = module.clika_state.signature
    return list(signature.graph_inputs(signature.flatten(args, kwargs)))


def _are_equal(first: Any, second: Any) -> bool:
    pairs = zip(_list_tensors(first), _list_tensors(second), strict=True)
    return all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in pairs)


def _list_tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _count_roundings(module: ClikaModule, given: Arguments, expected: Any, found: Sequence[Tensor]) -> int | str:
    """Return the largest difference, in float32 roundings of the largest element of each result.

    It is "rows" if they are the same detections in another order, or if almost equal scores have another order.

    Raises:
        AssertionError: it exceeds the bounds of the check after an export, or a shape or an integer differs.
    """
    graph, inputs = module.graph, _list_inputs(module, given)
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in _list_tensors(expected)]
    found = [torch.view_as_real(t) if t.is_complex() else t for t in found]
    assert len(found) == len(tensors), f"{len(found)} results instead of {len(tensors)}"
    differences = describe_differences(tensors, found)
    target = load_registry().targets["onnxruntime"]
    if differences and (
        has_same_detections(graph, tensors, found)
        or agrees_in_own_order(target, graph, inputs, found, ROUNDING_TOLERANCE)
    ):
        return "rows"
    assert not differences or is_within_rounding(graph, inputs, tensors, found), "; ".join(differences.values())
    floats = [
        (e.double(), f.double()) for e, f in zip(tensors, found, strict=True) if e.is_floating_point() and e.numel()
    ]
    units = [torch.finfo(torch.float32).eps * float(e.nan_to_num(0, 0, 0).abs().max()) for e, _ in floats]
    errors = [float((e - f).nan_to_num(0, 0, 0).abs().max()) for e, f in floats]
    return round(max((error / unit for error, unit in zip(errors, units, strict=True) if unit), default=0))


def _compare_shapes(_module: ClikaModule, _given: Arguments, expected: Any, found: Sequence[Tensor]) -> str:
    """Compare the shapes of random results.

    Raises:
        AssertionError: a shape differs.
    """
    shapes = [tuple(t.shape) for t in _list_tensors(expected)]
    assert [tuple(t.shape) for t in found] == shapes, f"{[tuple(t.shape) for t in found]} instead of {shapes}"
    return "shapes"


def _compute_decibels(graph: Graph, expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the median over samples of the SQNR, over all float results with the batch as first dim.

    Detections are matched first: each row of eager's with the nearest one of the file. A sample is then an image.
    """
    groups = list_row_groups(graph)
    if groups:
        matched = [_match_rows([expected[i] for i in group], [found[i] for i in group]) for group in groups]
        return statistics.median(float(10 * (signal / noise).log10()) for signal, noise in matched)
    pairs = [(e, f) for e, f in zip(expected, found, strict=True) if e.is_floating_point() and e.ndim]
    size = len(pairs[0][0])
    pairs = [(e, f) for e, f in pairs if len(e) == size]
    signal = sum(e.reshape(size, -1).double().square().sum(1) for e, _ in pairs)
    noise = sum((e - f).reshape(size, -1).double().square().sum(1) for e, f in pairs)
    return float(10 * (signal / noise).median().log10())


def _match_rows(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the squared sums of the rows of float tensors, and of their differences from the nearest rows found."""
    pairs = [(e, f) for e, f in zip(expected, found, strict=True) if e.is_floating_point()]
    rows, others = (torch.cat([pair[k].double().unsqueeze(-1).flatten(1) for pair in pairs], 1) for k in (0, 1))
    noise = torch.cdist(rows, others).amin(1) if len(others) else rows.norm(dim=1)
    return rows.square().sum(), noise.square().sum()
