"""Train a network on handwritten digits, quantize it to INT8, and compare the two in their runtimes.

`make demo` runs this. Alone: `python examples/digits.py [path/to/write.onnx]`. It takes about a minute.
"""

import functools
import importlib.util
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
    SimpleProgressBar,
    clika_compile,
)
from clika_ref.reporting.tables import print_table
from clika_ref.targets.cpu import INT32_ACCUMULATION_FLAGS, cpu_flags

EPOCHS = 5
BATCH = 64
CALIBRATION_BATCHES = 10
TIMED_RUNS = 100

Classifier = Callable[[Tensor], Tensor]


def main(path: Path) -> None:
    """Train, quantize, export and compare."""
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = digits()
    model = network()
    train(model, train_images, train_labels)

    tracing_inputs = [torch.zeros(1, 1, 32, 32), torch.zeros(2, 1, 32, 32)]  # they differ in dim 0: it is dynamic
    targets: dict[str, Any] = {"ONNX Runtime": DeploymentSettings_ONNXRuntime_ONNX()}
    if importlib.util.find_spec("openvino"):
        targets["OpenVINO"] = DeploymentSettings_OpenVINO_ONNX()
    float_module = clika_compile(model, tracing_inputs=tracing_inputs, discard_input_model=False)
    module = clika_compile(
        model,
        tracing_inputs=tracing_inputs,
        calibration_inputs=train_images.split(BATCH)[:CALIBRATION_BATCHES],
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, deployment in targets.items():
        suffix = name.replace(" ", "").lower()
        files = {kind: path.with_stem(f"{path.stem}-{suffix}-{kind}") for kind in ("float", "int8")}
        float_module.clika_export(files["float"], deployment_settings=deployment)
        module.clika_export(files["int8"], deployment_settings=deployment)
        rows |= compare(name, files, RUNTIMES[name], test_images, test_labels)
    show(rows)
    show_float_layers(module)
    show_missing_speedup(rows["ONNX Runtime, INT8"][4])
    print(f"\n  The report on every layer: {module.clika_report(path.with_suffix('.html'))}")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images ``[n, 1, 32, 32]`` from 0 to 1 and labels ``[n]``; three quarters are for training."""
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
    labels = torch.tensor(found.target)
    parts: Any = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return parts


class SeparableBlock(nn.Module):
    """A depthwise-separable residual block, as in MobileNetV2: widen, filter each channel, narrow, add the input."""

    def __init__(self, channels: int, expansion: int = 4) -> None:
        super().__init__()
        wide = channels * expansion
        self.layers = sequential(
            expand=nn.Conv2d(channels, wide, 1, bias=False),
            expand_norm=nn.BatchNorm2d(wide),
            expand_relu=nn.ReLU(),
            depthwise=nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            depthwise_norm=nn.BatchNorm2d(wide),
            depthwise_relu=nn.ReLU(),
            project=nn.Conv2d(wide, channels, 1, bias=False),
            project_norm=nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + layers(x)``."""
        return x + self.layers(x)


def network() -> nn.Module:
    """Return a convolutional network of 0.4 M parameters with three residual blocks."""
    stem = sequential(
        conv1=nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
        norm1=nn.BatchNorm2d(32),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 128, 3, stride=2, padding=1, bias=False),
        norm2=nn.BatchNorm2d(128),
        relu2=nn.ReLU(),
    )
    blocks = nn.Sequential(SeparableBlock(128), SeparableBlock(128), SeparableBlock(128))
    head = sequential(
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(0.2),
        linear=nn.Linear(128, 10),
    )
    return sequential(stem=stem, blocks=blocks, head=head)


def sequential(**layers: nn.Module) -> nn.Sequential:
    """Return ``nn.Sequential`` of named layers, so that reports show ``head.linear`` instead of ``2.3``."""
    return nn.Sequential(OrderedDict(layers))


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train a model, and leave it in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in SimpleProgressBar(range(EPOCHS), desc="Training", unit="epoch"):
        for indices in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


# The files need neither PyTorch nor clika-ref: each runtime loads them by itself, here with one thread.


def load_in_onnxruntime(path: Path) -> Classifier:
    """Return a function that runs a file in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = [given.name for given in session.get_inputs()]
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


@functools.cache
def open_core() -> Any:
    """Return OpenVINO's core: a signal may crash a process in which one of two cores has been freed."""
    return importlib.import_module("openvino").Core()


def load_in_openvino(path: Path) -> Classifier:
    """Return a function that runs a file in OpenVINO."""
    compiled = open_core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
    return lambda images: torch.from_numpy(compiled(images.numpy())[0].copy())


RUNTIMES = {"ONNX Runtime": load_in_onnxruntime, "OpenVINO": load_in_openvino}


def compare(
    name: str, files: dict[str, Path], load: Callable[[Path], Classifier], images: Tensor, labels: Tensor
) -> dict[str, tuple[float, ...]]:
    """Return accuracy, agreement, bytes, SQNR, and seconds at batch 1 and 64 of the float and the INT8 file."""
    runners = {kind: load(path) for kind, path in files.items()}
    outputs = {kind: torch.cat([run(part) for part in images.split(BATCH)]) for kind, run in runners.items()}
    seconds = [median_seconds([*runners.values()], images[:batch]) for batch in (1, BATCH)]
    error = (outputs["int8"] - outputs["float"]).square().sum() / outputs["float"].square().sum()
    decisions = {kind: found.argmax(1) for kind, found in outputs.items()}
    sqnr = {"float": float("inf"), "int8": -10 * error.log10().item()}
    return {
        f"{name}, {kind.upper() if kind == 'int8' else kind}": (
            percent(decisions[kind] == labels),
            percent(decisions[kind] == decisions["float"]),
            files[kind].stat().st_size,
            seconds[0][at],
            seconds[0][at] / seconds[0][0],
            seconds[1][at],
            sqnr[kind],
        )
        for at, kind in enumerate(files)
    }


def median_seconds(runners: list[Classifier], images: Tensor) -> list[float]:
    """Return the median seconds of each runner. They run in turn, so that a busy machine slows all alike."""
    seconds: list[list[float]] = [[] for _ in runners]
    for _ in range(TIMED_RUNS):
        for run, taken in zip(runners, seconds, strict=True):
            start = time.perf_counter()
            run(images)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def show(rows: dict[str, tuple[float, ...]]) -> None:
    """Print the comparison."""
    texts = [
        (
            name,
            f"{accuracy:.2f} %",
            f"{same:.2f} %",
            f"{size / 1000:,.0f} KB",
            f"{one * 1e3:.2f} ms ({share:.2f}x)",
            f"{many * 1e3:.1f} ms",
            f"{decibels:.1f} dB",
        )
        for name, (accuracy, same, size, one, share, many, decibels) in rows.items()
    ]
    columns = ["", "accuracy", "same decision", "size", "batch 1 (float = 1)", f"batch {BATCH}", "SQNR"]
    print_table(columns, texts, title="\n  450 test images, one thread")


def show_float_layers(module: Any) -> None:
    """Print the layers that stay in float, with reasons, in at most three lines."""
    layers = [layer for layer in module.clika_summary().layers if layer.reason]
    print(f"\n  Layers in float: {len(layers) or 'none'}")
    for layer in layers[:3]:
        print(f"    {layer.scope}: {layer.reason}")


def show_missing_speedup(share: float) -> None:
    """Print why INT8 is not faster, if it is not."""
    if share > 0.9:
        vnni = sorted(INT32_ACCUMULATION_FLAGS & cpu_flags())
        reason = f"although it has {vnni[0]}: is it busy?" if vnni else "as it has no INT8 dot product (VNNI)"
        print(f"\n  At batch 1, INT8 takes {share:.2f}x of float on this CPU, {reason}")


def percent(right: Tensor) -> float:
    """Return the percentage of true elements."""
    return 100 * right.float().mean().item()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits.onnx"))
