"""Prune half of the channels of a trained network, fine-tune it, and quantize it.

`python examples/prune_then_quantize.py [where/to/write.onnx]`. It takes some thirty seconds.
"""

import copy
import sys
from pathlib import Path

import torch
from digits import digits, network, percent, train
from qat import decisions, train_on
from torch import nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.reporting.tables import print_table


def main(path: Path) -> None:
    """Train, prune, fine-tune, quantize, and export after each step."""
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = digits()
    teacher = network()
    train(teacher, train_images, train_labels)
    calibration_inputs = train_images[:512].split(64)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str]] = []

    def note(stage: str, module: ClikaModule) -> None:
        artifact = module.clika_export(path)
        right = percent(decisions(module, test_images) == test_labels)
        rows.append((stage, f"{right:.2f} %", f"{artifact.facts['bytes'] / 1024:,.0f} KiB"))

    module = compile_copy(teacher, train_images)
    note("in float", module)

    # Half of the channels of each group are removed, with the weights that produce and read them.
    print(module.clika_prune(PruningSettings("structured", None, 0.5), calibration_inputs=calibration_inputs))
    note("pruned", module)
    train_on(
        module, teacher, train_images, train_labels
    )  # creates its optimizer after pruning, which replaces parameters
    note("and trained", module)

    module.clika_initialize_algorithms(QuantizationSettings(), calibration_inputs=calibration_inputs)
    note("and quantized", module)
    print_table(["stage", "accuracy", "file"], rows, title=f"\n  {path} after each stage")


def compile_copy(model: nn.Module, images: torch.Tensor) -> ClikaModule:
    """Compile a copy of a model for ONNX Runtime, for any number of images."""
    module = clika_compile(
        copy.deepcopy(model),
        tracing_inputs=[images[:2], images[:3]],
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    assert isinstance(module, ClikaModule)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/pruned_and_quantized.onnx"))
