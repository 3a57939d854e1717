"""Measure saved modules: file size relative to the weights, and loading time relative to safetensors alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import qat
from benchmarks.measuring import Names, format_verdict, measure_processor_seconds, run_in_fresh_process, run_in_turn
from benchmarks.models import MODELS

# isort: split
import safetensors.torch
import torch
from torch import nn

from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.compiled.quantization_state import target_of
from clika_ref.core.registry import load_registry
from clika_ref.module.weight_storage import find_storable_weights
from clika_ref.reporting.tables import print_table

MAX_SIZE_RATIO, EXTRA_BYTES, MAX_EXTRA_LOADING_S = 1.02, 200e3, 0.2
"""Limits of issue 6: the size of a file, less ``EXTRA_BYTES``, relative to the minimum for its weights, and the loading
time beyond that of safetensors alone."""

INT4_SETTINGS = QuantizationSettings(
    weights_num_bits=4, prefer_weights_only_quantization=True, quantization_sensitivity_threshold=1e9
)

SETTINGS: Mapping[str, QuantizationSettings] = {"int8": qat.INT8_SETTINGS, "int4, weights only": INT4_SETTINGS}

DEEP_NETWORKS = ("mobilenet_v3_large", "densenet121")
"""Models of many layers with few weights each: graph, plan and ranges are a larger part of their files."""

SUBJECTS: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = qat.SUBJECTS | {
    name: lambda name=name: (MODELS[name]().make(), torch.randn(16, 3, 64, 64)) for name in DEEP_NETWORKS
}


def count_min_bytes(module: ClikaModule) -> int:
    """Return the minimum bytes for the weights of a quantized module: packed integers, scales, and float tensors."""
    quantized, graph, registry = module.clika_state.quantized, module.graph, load_registry()
    assert quantized is not None
    stored = find_storable_weights(graph, quantized.plan, target_of(quantized, registry), registry)
    planned = quantized.plan.weights | {name: values.scales for name, values in quantized.plan.packed_weights.items()}
    quantized_bytes = sum(weight.quantized.numel() * weight.bits // 8 for weight in stored.values())
    floats = [v.data for name, v in graph.constants.items() if name not in stored and v.data is not None]
    return quantized_bytes + sum(t.nbytes for t in (*planned.values(), *floats))


def main(name: str, settings: str, rounds: str) -> dict[str, Any]:
    """Quantize and save one model, and load its file in turn with clika-ref and with safetensors alone."""
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # a new encoder's layers are equal copies, which training changes
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    module: Any = clika_compile(
        model,
        calibration_inputs=[x],
        quantization_settings=SETTINGS[settings],
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        saving = measure_processor_seconds(lambda: module.clika_save(file))
        loads = {
            "clika-ref": lambda: measure_processor_seconds(lambda: ClikaModule.clika_load(file)),
            "safetensors": lambda: measure_processor_seconds(lambda: safetensors.torch.load_file(file)),
        }
        run_in_turn(loads, 1)
        seconds = run_in_turn(loads, int(rounds))
        return {
            "bytes": file.stat().st_size,
            "min_bytes": count_min_bytes(module),
            "seconds": seconds,
            "saving_s": saving,
        }


def run(names: Names = None, rounds: int = 9) -> None:
    """Measure saved modules: file size relative to the weights, loading relative to safetensors."""
    rows: list[Sequence[object]] = []
    size_ratio, extra_loading_s = 0.0, 0.0
    for name in names or SUBJECTS:
        for settings in SETTINGS:
            found = run_in_fresh_process("benchmarks.checkpoints", name, settings, str(rounds))
            own, peer = (statistics.median(found["seconds"][library]) for library in ("clika-ref", "safetensors"))
            size_ratio = max(size_ratio, (found["bytes"] - EXTRA_BYTES) / found["min_bytes"])
            extra_loading_s = max(extra_loading_s, own - peer)
            rows.append(
                (
                    name,
                    settings,
                    f"{found['bytes'] / 1e6:.2f} MB",
                    f"{found['bytes'] / found['min_bytes']:.3f}",
                    f"{found['saving_s']:.2f} s",
                    f"{own * 1e3:.0f} ms",
                    f"{peer * 1e3:.0f} ms",
                    f"{own / peer:.1f}",
                )
            )
    title = "Saved modules: loading in turn, one thread, processor time, with loaded plugins"
    header = (
        "model",
        "weights",
        "file",
        "file / minimum for weights",
        "saving",
        "loading",
        "safetensors alone",
        "ratio",
    )
    print_table(header, rows, title=title)
    print(f"Largest file, less 200 KB, / minimum for weights: {format_verdict(size_ratio, MAX_SIZE_RATIO)}")
    print(f"Longest loading beyond safetensors alone, s: {format_verdict(extra_loading_s, MAX_EXTRA_LOADING_S)}")
