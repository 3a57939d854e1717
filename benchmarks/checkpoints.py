"""Files of saved modules: size beside the bytes that weights need, and time to load beside safetensors' own."""

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

LARGER, SPARE_BYTES, SLOWER_S = 1.02, 200e3, 0.2
"""By how much a file may be larger than what its weights need, and slower than safetensors alone (issue 6)."""

FOUR_BITS = QuantizationSettings(
    weights_num_bits=4, prefer_weights_only_quantization=True, quantization_sensitivity_threshold=1e9
)

SETTINGS: Mapping[str, QuantizationSettings] = {"int8": qat.EVERY_LAYER, "int4, weights only": FOUR_BITS}

DEEP_NETWORKS = ("mobilenet_v3_large", "densenet121")
"""Models of many layers with few weights each, of which graph, plan and ranges are a larger part."""

SUBJECTS: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = qat.SUBJECTS | {
    name: lambda name=name: (MODELS[name]().make(), torch.randn(16, 3, 64, 64)) for name in DEEP_NETWORKS
}


def count_needed_bytes(module: ClikaModule) -> int:
    """Return what the weights of a quantized module need: integers in their bits, scales, and what stays float."""
    quantized, graph, registry = module.clika_state.quantized, module.graph, load_registry()
    assert quantized is not None
    stored = find_storable_weights(graph, quantized.plan, target_of(quantized, registry), registry)
    planned = quantized.plan.weights | {name: values.scales for name, values in quantized.plan.packed_weights.items()}
    quantized_bytes = sum(weight.quantized.numel() * weight.bits // 8 for weight in stored.values())
    floats = [v.data for name, v in graph.constants.items() if name not in stored and v.data is not None]
    return quantized_bytes + sum(t.nbytes for t in (*planned.values(), *floats))


def main(name: str, settings: str, rounds: str) -> dict[str, Any]:
    """Quantize and save one model, and load it in turn with what safetensors alone reads of the file."""
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # the layers of a new encoder are copies of one, which training ends
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
            "ours": lambda: measure_processor_seconds(lambda: ClikaModule.clika_load(file)),
            "safetensors": lambda: measure_processor_seconds(lambda: safetensors.torch.load_file(file)),
        }
        run_in_turn(loads, 1)
        seconds = run_in_turn(loads, int(rounds))
        return {
            "bytes": file.stat().st_size,
            "needed": count_needed_bytes(module),
            "seconds": seconds,
            "saving": saving,
        }


def run(names: Names = None, rounds: int = 9) -> None:
    """Files of saved modules: size against what weights need, loading against safetensors' own; not part of all."""
    rows: list[Sequence[object]] = []
    size, slower = 0.0, 0.0
    for name in names or SUBJECTS:
        for settings in SETTINGS:
            found = run_in_fresh_process("benchmarks.checkpoints", name, settings, str(rounds))
            clika_ref, torch_save = (statistics.median(found["seconds"][method]) for method in ("ours", "safetensors"))
            size = max(size, (found["bytes"] - SPARE_BYTES) / found["needed"])
            slower = max(slower, clika_ref - torch_save)
            rows.append(
                (
                    name,
                    settings,
                    f"{found['bytes'] / 1e6:.2f} MB",
                    f"{found['bytes'] / found['needed']:.3f}",
                    f"{found['saving']:.2f} s",
                    f"{clika_ref * 1e3:.0f} ms",
                    f"{torch_save * 1e3:.0f} ms",
                    f"{clika_ref / torch_save:.1f}",
                )
            )
    title = "Saved modules; loads in turn, one thread, processor time, plugins loaded before"
    header = ("model", "weights", "file", "file / needed", "saving", "loading", "safetensors", "ratio")
    print_table(header, rows, title=title)
    print(f"Largest file, less 200 KB, to what its weights need: {format_verdict(size, LARGER)}")
    print(f"Seconds of loading beyond safetensors' own: {format_verdict(slower, SLOWER_S)}")
