"""What training leaves of the accuracy on digits after each compression, and what half of the channels save."""

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
from benchmarks.ptq.digits import BATCH, convolutional, data, depthwise, train_network
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
EPOCHS, RATE = 15, 1e-4
"""Of training in integers: about a hundredth of the highest rate in float."""

TIMES_FASTER = 1.6
"""Of the artifact without half of its channels, at least (issue 6)."""


def dense() -> nn.Module:
    """Return linear layers, whose weights ONNX Runtime takes in four bits."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


@dataclass(frozen=True)
class Compression:
    """A compression of a network, after which it is trained."""

    build: Callable[[], nn.Module]
    settings: Mapping[str, Any]
    points: float
    """Of accuracy that it may lose, in per cent, as a mean of all seeds (issue 6)."""
    epochs: int = EPOCHS
    rate: float = RATE
    is_timed: bool = False
    """Whether its artifact is to be faster."""


INT8_SETTINGS = {"quantization_settings": QuantizationSettings(automatic_skip_quantization=False)}

FOUR_BITS = {
    "quantization_settings": QuantizationSettings(
        weights_num_bits=4,
        prefer_weights_only_quantization=True,
        weights_only_quantization_block_size=32,
        automatic_skip_quantization=False,
    )
}

LIVE_NORM_SETTINGS = {"batch_norm": "live"}
"""What is pruned has other statistics than before."""

COMPRESSIONS: Mapping[str, Compression] = {
    "INT8": Compression(convolutional, INT8_SETTINGS, 0.0),
    "INT8, depthwise": Compression(depthwise, INT8_SETTINGS, 0.0, epochs=30, rate=3e-4),
    "INT4 weights": Compression(dense, FOUR_BITS, 0.5),
    "2:4": Compression(
        convolutional, {"pruning_settings": PruningSettings("2:4", None)} | LIVE_NORM_SETTINGS, 0.2, rate=1e-3
    ),
    "half of the channels": Compression(
        convolutional,
        {"pruning_settings": PruningSettings("structured", None, 0.5)} | LIVE_NORM_SETTINGS,
        0.5,
        epochs=30,
        rate=3e-3,
        is_timed=True,
    ),
}


def fine_tune(module: ClikaModule, teacher: nn.Module, compression: Compression, seed: int) -> ClikaModule:
    """Train a module on the digits, and on what the original says of them."""
    images, labels, *_ = data()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], compression.rate)
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


def accuracy(run: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the per cent of the test images that are told right."""
    *_, images, labels = data()
    with torch.no_grad():
        return 100 * (run(images).argmax(1) == labels).float().mean().item()


def main(name: str, seed: str) -> dict[str, float]:
    """Train a network, compress it, train it on, and judge its artifact in ONNX Runtime."""
    torch.manual_seed(int(seed))
    compression, target = COMPRESSIONS[name], load_registry().targets["onnxruntime"]
    teacher = train_network(compression.build(), int(seed))
    images, *_ = data()
    batches = list(images[: BATCH * 16].split(BATCH))

    def compiled(**settings: Any) -> ClikaModule:
        return clika_compile(
            copy.deepcopy(teacher),
            tracing_inputs=[images[:BATCH], images[: BATCH - 1]],
            calibration_inputs=batches,
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            **settings,
        )

    with TemporaryDirectory() as folder:
        module = compiled(**compression.settings)
        before = accuracy(module)
        artifact = fine_tune(module, teacher, compression, int(seed)).clika_export(Path(folder) / "after.onnx")
        session = target.load(artifact)
        found = {"float": accuracy(teacher), "before": before, "after": accuracy(lambda x: session([x])[0])}
        if compression.is_timed:
            whole = target.load(compiled().clika_export(Path(folder) / "before.onnx"))
            found["faster"] = 1 / measure_seconds_and_ratio(session, [images[:BATCH]], whole, [images[:BATCH]])[1]
    return found


def run(names: Names = None, seeds: int = SEEDS) -> None:
    """Accuracy on handwritten digits after each compression and training; not part of all."""
    rows: list[Sequence[object]] = []
    verdicts: list[str] = []
    for name in names or COMPRESSIONS:
        found = [run_in_fresh_process("benchmarks.digits", name, str(seed)) for seed in range(seeds)]
        mean = {key: statistics.mean(each[key] for each in found) for key in found[0]}
        rows.append((name, *(f"{mean[key]:.2f} %" for key in ("float", "before", "after"))))
        verdicts.append(
            f"{name}: points lost: {format_verdict(mean['float'] - mean['after'], COMPRESSIONS[name].points)}"
        )
        if "faster" in mean:
            is_met = "reached" if mean["faster"] >= TIMES_FASTER else "MISSED"
            verdicts.append(f"{name}: {mean['faster']:.2f} times faster of at least {TIMES_FASTER}: {is_met}")
    title = f"Accuracy on 540 digits, mean of {seeds} seeds, of the artifact in ONNX Runtime"
    print_table(("compression", "in float", "before training", "after"), rows, title=title)
    print("\n".join(verdicts))
