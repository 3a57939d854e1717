"""Train a network on handwritten digits, compile it, and compare what comes out with what went in.

`make demo` runs this. Alone: `python examples/digits.py [where/to/write.onnx]`. It takes some twenty seconds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, SimpleProgressBar, clika_compile
from clika_ref.reporting.tables import print_table

EPOCHS = 6
BATCH = 64
TIMED_RUNS = 50


def main(path: Path) -> None:
    """Tell the whole story: train, compile, export, run, compare."""
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = digits()
    model = network()
    train(model, train_images, train_labels)

    # Two inputs that differ in the first side: that side becomes dynamic. Their values play no part.
    tracing_inputs = [torch.zeros(1, 1, 8, 8), torch.zeros(2, 1, 8, 8)]
    module = clika_compile(
        model,
        tracing_inputs=tracing_inputs,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,  # the comparison below still needs it
    )

    path.parent.mkdir(parents=True, exist_ok=True)
    module.clika_export(path)

    # From here on the file needs neither PyTorch nor clika-ref: any ONNX Runtime will do.
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [given.name for given in session.get_inputs()]

    compare(
        {
            "PyTorch, eager": model,
            "ClikaModule": module,
            "ONNX Runtime": lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0]),
        },
        sizes=[weight_bytes(model), weight_bytes(module), path.stat().st_size],
        images=test_images,  # 450 at once: a batch that was never traced
        labels=test_labels,
    )
    print_table(["stage", "seconds"], module.timings.items(), title=f"  What it took to make {path}")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images ``[n, 1, 8, 8]`` from 0 to 1 and labels ``[n]``, three quarters of them to train on."""
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    parts: Any = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return parts


def network() -> nn.Module:
    """Return a small convolutional network, with what compiling removes: batch norm and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128 * 2 * 2, 10)),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train a model as usual, and leave it in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in SimpleProgressBar(range(EPOCHS), desc="Training", unit="epoch"):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    model.eval()


def compare(
    contenders: dict[str, Callable[[Tensor], Tensor]], sizes: list[int], images: Tensor, labels: Tensor
) -> None:
    """Print accuracy, agreement, size and latency of all contenders; the first is what the others are held against."""
    with torch.no_grad():
        decisions = [run(images).argmax(1) for run in contenders.values()]
        latencies = median_latencies(list(contenders.values()), images)
    rows = [
        (
            name,
            f"{percent(decided == labels):.2f} %",
            f"{percent(decided == decisions[0]):.2f} %",
            f"{size / 1024:,.0f} KiB",
            f"{latency * 1e3:.2f} ms",
            f"{latency / latencies[0]:.2f}x",
        )
        for name, decided, size, latency in zip(contenders, decisions, sizes, latencies, strict=True)
    ]
    columns = ["", "accuracy", "same decision", "size", "latency", "of eager"]
    print_table(columns, rows, title=f"\n  {len(images)} handwritten digits that no training has seen, in one batch")


def median_latencies(contenders: list[Callable[[Tensor], Tensor]], images: Tensor) -> list[float]:
    """Return the median seconds of each contender, run in turn so that a busy machine slows all of them alike."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(TIMED_RUNS):
        for run, taken in zip(contenders, seconds, strict=True):
            start = time.perf_counter()
            run(images)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def percent(right: Tensor) -> float:
    """Return how many of the elements hold."""
    return 100 * right.float().mean().item()


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits.onnx"))
