"""Quantization-aware training (QAT): train a network on handwritten digits, quantize it, and fine-tune it.

`python examples/qat.py [where/to/write.onnx]`. It takes some thirty seconds.
"""

import sys
from pathlib import Path

import torch
from digits import digits, network, percent, train
from torch import Tensor, nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    QuantizationSettings,
    SimpleProgressBar,
    clika_compile,
    distillation_loss,
)

EPOCHS = 4
BATCH = 64
RATE = 2e-4  # a tenth of the rate that the network was trained with


def main(path: Path) -> None:
    """Train, quantize, fine-tune with fake quantization, and export."""
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = digits()
    teacher = network()
    train(teacher, train_images, train_labels)

    module = clika_compile(
        teacher,
        tracing_inputs=[train_images[:2], train_images[:3]],
        calibration_inputs=train_images[: 8 * BATCH].split(BATCH),
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,  # it is the teacher below
    )
    assert isinstance(module, ClikaModule)
    quantized = percent(decisions(module, test_images) == test_labels)

    train_on(module, teacher, train_images, train_labels)

    # Training used fake quantization. In eval mode the module computes the same INT8 graph as the file.
    path.parent.mkdir(parents=True, exist_ok=True)
    module.clika_export(path)
    print(f"{'in float':28}{percent(decisions(teacher, test_images) == test_labels):.2f} %")
    print(f"{'quantized':28}{quantized:.2f} %")
    print(f"{'quantized, after QAT':28}{percent(decisions(module, test_images) == test_labels):.2f} %")
    print(f"{path}: {path.stat().st_size / 1024:,.0f} KiB")


def train_on(module: ClikaModule, teacher: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train a module as any other, with the labels and with distillation from the original."""
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    module.train()
    for _ in SimpleProgressBar(range(EPOCHS), desc="QAT", unit="epoch"):
        for indices in torch.randperm(len(images)).split(BATCH):
            outputs = module(images[indices])
            loss = nn.functional.cross_entropy(outputs, labels[indices])
            loss = loss + distillation_loss(outputs, teacher(images[indices]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    module.eval()


def decisions(model: nn.Module, images: Tensor) -> Tensor:
    """Return the predicted digit of each image."""
    with torch.no_grad():
        return model(images).argmax(1)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/qat.onnx"))
