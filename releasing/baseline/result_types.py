"""Describe the public attributes of the results of ClikaModule's methods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import clika_ref

ORT = clika_ref.DeploymentSettings_ONNXRuntime_ONNX()
TENSORRT = clika_ref.DeploymentSettings_TensorRT_ONNX()


def describe_results() -> dict[str, str]:
    """Return the type of each public attribute of each result, and of the elements of those that are lists."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, make in _results(Path(folder)).items():
            found |= _describe(f"{method}()", make())
    return found


def _results(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """Return a function for each method that calls it."""
    calls = [torch.rand(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def compile_float(**arguments: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        return clika_ref.clika_compile(model, calibration_inputs=calls, deployment_settings=ORT, **arguments)

    module = compile_float(quantization_settings=clika_ref.QuantizationSettings())
    pruning = clika_ref.PruningSettings("structured", None, 0.5)
    return {
        "clika_export": lambda: module.clika_export(folder / "model.onnx"),
        "clika_summary": module.clika_summary,
        "clika_explain": module.clika_explain,
        "clika_compare_targets": lambda: module.clika_compare_targets(ORT, TENSORRT),
        "clika_prune": lambda: compile_float().clika_prune(pruning, calibration_inputs=calls),
        "clika_attach_lora": lambda: compile_float().clika_attach_lora(clika_ref.LoraSettings()),
        "clika_lora_config": lambda: compile_float(global_lora_settings=clika_ref.LoraSettings()).clika_lora_config(),
        "clika_initialize_algorithms": lambda: module.clika_initialize_algorithms(
            clika_ref.QuantizationSettings(), calibration_inputs=calls
        ),
    }


def _describe(name: str, value: Any, *, is_nested: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the public attributes of a value, and those of the first element of each list among them."""
    yield name, _type_name(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{name}[{key!r}]", _type_name(item)
        return
    if not _is_ours(value):
        return
    for attribute in sorted(a for a in dir(value) if not a.startswith("_")):
        item = getattr(value, attribute)
        yield f"{name}.{attribute}", _type_name(item)
        if isinstance(item, Sequence) and not is_nested and item and _is_ours(item[0]):
            yield from _describe(f"{name}.{attribute}[]", item[0], is_nested=True)


def _type_name(value: Any) -> str:
    """Return the name of a type; one of our own is an object or a callable, as its name is no part of the interface."""
    if callable(value):
        return "callable"
    return "object" if _is_ours(value) else type(value).__name__


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("clika_ref")
