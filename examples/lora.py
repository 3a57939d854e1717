"""Train an adapter for each of two new tasks on one INT4 network, whose weights do not change.

`python examples/lora.py [folder/to/write/to]`. It takes some twenty seconds.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import safetensors.torch
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    LoraSettings,
    QuantizationSettings,
    SimpleProgressBar,
    clika_compile,
)
from clika_ref.reporting.tables import print_table

EPOCHS = 12
ADAPTER_EPOCHS = 30
BATCH = 64

Images = Callable[[Tensor], Tensor]

TASKS: Mapping[str, Images] = {
    "turned": lambda images: images.rot90(1, (1, 2)),
    "mirrored": lambda images: images.flip(2),
}
"""Changes of the images that the network was trained on, by task."""


def main(folder: Path) -> None:
    """Train, quantize weights to INT4, train and save an adapter per task, then load and export each."""
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = digits()
    model = network()
    train(model, train_images, train_labels, EPOCHS, rate=2e-3)

    module = clika_compile(
        model,
        tracing_inputs=[train_images[:2], train_images[:3]],  # the batch differs, so it becomes dynamic
        calibration_inputs=train_images.split(BATCH)[:8],
        quantization_settings=QuantizationSettings(
            prefer_weights_only_quantization=True,
            weights_num_bits=4,
            weights_only_quantization_block_size=[32],
            automatic_skip_quantization=False,
        ),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(global_lora_settings=LoraSettings(rank=4, alpha=8)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    untrained = module.clika_lora_state_dict()
    untrained = {name: matrix.clone() for name, matrix in untrained.items()}

    rows = [("as trained", percent(module, test_images, test_labels), "", "")]
    for task, change in TASKS.items():
        # Only the adapter is trained and saved; all tasks share the base model.
        module.clika_load_lora_state_dict(untrained)
        before = percent(module, change(test_images), test_labels)
        train(module, change(train_images), train_labels, ADAPTER_EPOCHS, rate=1e-2)
        file = folder / f"{task}.safetensors"
        safetensors.torch.save_file(module.clika_lora_state_dict(), file)
        rows.append((task, before, percent(module, change(test_images), test_labels), f"{kibibytes(file):.0f} KiB"))

    print_table(["task", "base alone", "with its adapter", "adapter"], rows, title="\n  Accuracy on 450 unseen digits")
    rows = []
    for task, change in TASKS.items():
        module.clika_load_lora_state_dict(safetensors.torch.load_file(folder / f"{task}.safetensors"))
        path = folder / f"{task}.onnx"
        module.clika_export(path)  # INT4 weights, and the unmerged adapter next to them
        rows.append((path.name, f"{kibibytes(path):.0f} KiB", percent(runner(path), change(test_images), test_labels)))
    rows.append(("float weights", f"{sum(p.nbytes for p in model.parameters()) / 1024:.0f} KiB", ""))
    print_table(["file", "size", "accuracy in ONNX Runtime"], rows, title="\n  One base, two files")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images ``[n, 8, 8]`` from 0 to 1 and labels ``[n]``, three quarters of them to train on."""
    found: Any = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
    parts: Any = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return parts


def network() -> nn.Module:
    """Return a network of three linear layers."""
    layers = (nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Train the parameters that require gradients, and leave the model in eval mode."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in SimpleProgressBar(range(epochs), desc="Training", unit="epoch"):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    model.eval()


def runner(path: Path) -> Images:
    """Return a function that runs a file in ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [given.name for given in session.get_inputs()]
    return lambda images: torch.from_numpy(session.run(None, {name: images.contiguous().numpy()})[0])


def percent(run: Images, images: Tensor, labels: Tensor) -> str:
    """Return the accuracy, as text."""
    with torch.no_grad():
        return f"{100 * (run(images).argmax(1) == labels).float().mean().item():.2f} %"


def kibibytes(path: Path) -> float:
    """Return the size of a file in KiB."""
    return path.stat().st_size / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/lora"))
