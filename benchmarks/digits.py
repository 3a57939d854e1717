"""Measure accuracy on digits after compression and fine-tuning, and the speedup of structured pruning."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import Names, format_verdict, run_in_fresh_process
from benchmarks.ptq.digits import (
    BATCH,
    build_convolutional_network,
    build_depthwise_network,
    load_data,
    train_network,
)
from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
    distillation_loss,
)
from clika_ref.compiled.latency import measure_seconds_and_ratio
from clika_ref.core.registry import load_registry
from clika_ref.reporting.tables import print_table

SEEDS = 3
TEMPERATURE = 2.0
EPOCHS, LEARNING_RATE = 15, 1e-4
"""For quantization-aware training: about a hundredth of the highest learning rate in float."""

MIN_SPEEDUP = 1.6
"""Of the artifact with half of its channels removed (issue 6)."""


def build_linear_network() -> nn.Module:
    """Return a network of linear layers, whose weights ONNX Runtime supports in INT4."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


@dataclass(frozen=True)
class Compression:
    """A network, its compression, and the fine-tuning that follows."""

    build: Callable[[], nn.Module]
    settings: Mapping[str, Any]
    max_lost_points: float
    """Limit of the lost accuracy in percentage points, as the mean of all seeds (issue 6)."""
    epochs: int = EPOCHS
    learning_rate: float = LEARNING_RATE
    is_timed: bool = False
    """Whether the artifact must be faster than in float."""


INT8_SETTINGS = {"quantization_settings": QuantizationSettings(automatic_skip_quantization=False)}

INT4_SETTINGS = {
    "quantization_settings": QuantizationSettings(
        weights_num_bits=4,
        prefer_weights_only_quantization=True,
        weights_only_quantization_block_size=32,
        automatic_skip_quantization=False,
    )
}

LIVE_NORM_SETTINGS = {"batch_norm": "live"}
"""Pruning changes the statistics that batch norm sees."""

COMPRESSIONS: Mapping[str, Compression] = {
    "INT8": Compression(build_convolutional_network, INT8_SETTINGS, 0.0),
    "INT8, depthwise": Compression(build_depthwise_network, INT8_SETTINGS, 0.0, epochs=30, learning_rate=3e-4),
    "INT4 weights": Compression(build_linear_network, INT4_SETTINGS, 0.5),
    "2:4": Compression(
        build_convolutional_network,
        {"pruning_settings": PruningSettings("2:4", None)} | LIVE_NORM_SETTINGS,
        0.2,
        learning_rate=1e-3,
    ),
    "half of the channels": Compression(
        build_convolutional_network,
        {"pruning_settings": PruningSettings("structured", None, 0.5)} | LIVE_NORM_SETTINGS,
        0.5,
        epochs=30,
        learning_rate=3e-3,
        is_timed=True,
    ),
}


def fine_tune(module: ClikaModule, teacher: nn.Module, compression: Compression, seed: int) -> ClikaModule:
    """Train a module on the digits, with distillation from the original."""
    images, labels, *_ = load_data()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], compression.learning_rate)
    steps = compression.epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    module.train()
    for _ in range(compression.epochs):
        order = torch.randperm(len(images), generator=generator)
        for part in order[: len(images) // BATCH * BATCH].split(BATCH):
            outputs = module(images[part])
            loss = nn.functional.cross_entropy(outputs, labels[part])
            loss = loss + distillation_loss(outputs, teacher(images[part]), temperature=TEMPERATURE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    module.eval()
    return module


def measure_accuracy(run: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the accuracy on the test images, in percent."""
    *_, images, labels = load_data()
    with torch.no_grad():
        return 100 * (run(images).argmax(1) == labels).float().mean().item()


def main(name: str, seed: str) -> dict[str, float]:
    """Train a network, compress it, fine-tune it, and evaluate its artifact in ONNX Runtime."""
    torch.manual_seed(int(seed))
    compression, target = COMPRESSIONS[name], load_registry().targets["onnxruntime"]
    teacher = train_network(compression.build(), int(seed))
    images, *_ = load_data()
    batches = list(images[: BATCH * 16].split(BATCH))

    def compile_teacher(**settings: Any) -> ClikaModule:
        module = clika_compile(
            copy.deepcopy(teacher),
            tracing_inputs=[images[:BATCH], images[: BATCH - 1]],
            calibration_inputs=batches,
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            **settings,
        )
        assert isinstance(module, ClikaModule)
        return module

    with TemporaryDirectory() as folder:
        module = compile_teacher(**compression.settings)
        accuracies = {"float": measure_accuracy(teacher), "before": measure_accuracy(module)}
        artifact = fine_tune(module, teacher, compression, int(seed)).clika_export(Path(folder) / "after.onnx")
        session = target.load(artifact)
        found = accuracies | {"after": measure_accuracy(lambda x: session([x])[0])}
        if compression.is_timed:
            original = target.load(compile_teacher().clika_export(Path(folder) / "before.onnx"))
            found["speedup"] = 1 / measure_seconds_and_ratio(session, [images[:BATCH]], original, [images[:BATCH]])[1]
    return found


def run(names: Names = None, seeds: int = SEEDS) -> None:
    """Measure accuracy on handwritten digits after compression and fine-tuning."""
    rows: list[Sequence[object]] = []
    verdicts: list[str] = []
    for name in names or COMPRESSIONS:
        found = [run_in_fresh_process("benchmarks.digits", name, str(seed)) for seed in range(seeds)]
        mean = {key: statistics.mean(each[key] for each in found) for key in found[0]}
        rows.append((name, *(f"{mean[key]:.2f} %" for key in ("float", "before", "after"))))
        lost_points = mean["float"] - mean["after"]
        verdicts.append(f"{name}: lost points: {format_verdict(lost_points, COMPRESSIONS[name].max_lost_points)}")
        if "speedup" in mean:
            state = "met" if mean["speedup"] >= MIN_SPEEDUP else "NOT MET"
            verdicts.append(f"{name}: speedup: {mean['speedup']:.2f}, at least {MIN_SPEEDUP}: {state}")
    title = f"Accuracy on 540 digits, mean of {seeds} seeds; after training, measured in ONNX Runtime"
    print_table(("compression", "in float", "compressed", "trained"), rows, title=title)
    print("\n".join(verdicts))
