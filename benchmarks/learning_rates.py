"""Train digits with fixed and with learned scales, at the learning rates at which the float network trains."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.measuring import Names, run_in_fresh_process
from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.reporting.tables import print_table

SEEDS, STEPS, BATCH = 5, 300, 64

TRAINING_IMAGES = 1300
"""The others, by other writers, are held out."""

FLOAT_STEPS, FLOAT_LEARNING_RATE = 400, 0.01
"""Of SGD in float, before quantization."""

MAX_FLOAT_LOSS_POINTS, MAX_LOST_POINTS = 2.0, 0.5
"""Below the best accuracy of float, for a rate to count; and below fixed scales (issue 39)."""


def build_mlp() -> nn.Module:
    """Return three linear layers with GELU."""
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.GELU()),
        *(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)),
    )


def build_convolutions() -> nn.Module:
    """Return two convolutions without batch norm, and a linear layer."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)),
    )


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"MLP": build_mlp, "convolutions": build_convolutions}


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer with a learning rate."""

    name: str
    rate: float

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that require gradients."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.name == "Adam":
            return torch.optim.Adam(parameters, lr=self.rate)
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)


OPTIMIZERS = [
    *(OptimizerChoice("SGD", rate) for rate in (1e-4, 1e-3, 1e-2, 5e-2, 1e-1)),
    *(OptimizerChoice("Adam", rate) for rate in (1e-4, 1e-3, 1e-2)),
]


def load_images() -> tuple[Tensor, Tensor]:
    """Return all images ``float32[n, 64]`` in [0, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def train(model: nn.Module, chosen: OptimizerChoice, steps: int, seed: int) -> nn.Module:
    """Train a model on random batches, in place."""
    images, labels = load_images()
    generator, optimizer = torch.Generator().manual_seed(seed), chosen.build(model)
    model.train()
    for _ in range(steps):
        batch = torch.randint(0, TRAINING_IMAGES, (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def measure_accuracy(model: nn.Module) -> float:
    """Return the accuracy on held-out images, in percent."""
    images, labels = (all_of[TRAINING_IMAGES:] for all_of in load_images())
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def quantize(model: nn.Module) -> ClikaModule:
    """Quantize a model with default settings."""
    images = load_images()[0]
    module = clika_compile(
        model,
        tracing_inputs=[images[:1], images[:2]],
        calibration_inputs=list(images[:640].split(32)),
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
    )
    assert isinstance(module, ClikaModule)
    return module


def fix_scales(module: ClikaModule) -> ClikaModule:
    """Freeze the learned scales of a module, in place."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("clika."))
    return module


def main(network: str, seed: str, steps: str) -> list[dict[str, float]]:
    """Train a network in float, quantize it, and train all three further; return accuracies for each optimizer."""
    torch.manual_seed(int(seed))
    chosen = OptimizerChoice("SGD", FLOAT_LEARNING_RATE)
    model = train(NETWORKS[network](), chosen, FLOAT_STEPS, int(seed))
    module = quantize(model)
    found: list[dict[str, float]] = []
    for optimizer in OPTIMIZERS:
        starts = {
            "float": copy.deepcopy(model),
            "fixed": fix_scales(copy.deepcopy(module)),
            "learned": copy.deepcopy(module),
        }
        trained = {kind: train(start, optimizer, int(steps), int(seed) + 100) for kind, start in starts.items()}
        found.append({kind: measure_accuracy(each) for kind, each in trained.items()})
    return found


def run(names: Names = None, seeds: int = SEEDS, steps: int = STEPS) -> None:
    """Compare training with learned scales, with fixed scales and in float, at several learning rates."""
    rows: list[Sequence[object]] = []
    missed = 0
    for name in names or NETWORKS:
        found = [
            run_in_fresh_process("benchmarks.learning_rates", name, str(seed), str(steps)) for seed in range(seeds)
        ]
        best = max(statistics.mean(each[i]["float"] for each in found) for i in range(len(OPTIMIZERS)))
        for i, optimizer in enumerate(OPTIMIZERS):
            mean = {kind: statistics.mean(each[i][kind] for each in found) for kind in ("float", "fixed", "learned")}
            gains = [each[i]["learned"] - each[i]["fixed"] for each in found]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
            verdict = "float is not at its best"
            if mean["float"] >= best - MAX_FLOAT_LOSS_POINTS:
                is_met = statistics.mean(gains) >= -MAX_LOST_POINTS
                verdict, missed = ("met", missed) if is_met else ("NOT MET", missed + 1)
            accuracies = (f"{mean[kind]:.2f} %" for kind in mean)
            gain = f"{statistics.mean(gains):+.2f} ± {error:.2f}"
            rows.append((name, f"{optimizer.name}, {optimizer.rate:g}", *accuracies, gain, verdict))
    columns = ("network", "optimizer, rate", "float", "fixed scales", "learned scales", "learned - fixed", "verdict")
    print_table(columns, rows, title=f"Accuracy on held-out digits after {steps} steps, mean of {seeds} seeds")
    limit = f"at most {MAX_LOST_POINTS:g} points below fixed scales, within {MAX_FLOAT_LOSS_POINTS:g} of float's best"
    print(f"Learned scales {limit}: {f'NOT MET in {missed} rows' if missed else 'met'}")
