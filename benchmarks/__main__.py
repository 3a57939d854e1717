"""The command line: run every benchmark, or one by name."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import attention as attention_part
from benchmarks import checkpoints as checkpoints_part
from benchmarks import digits as digits_part
from benchmarks import efficientnet as efficientnet_part
from benchmarks import export as export_part
from benchmarks import forward as forward_part
from benchmarks import imports as import_part
from benchmarks import pruning as pruning_part
from benchmarks import report as report_part
from benchmarks import scaling as scaling_part
from benchmarks.ptq import run as quantization_part
from benchmarks.qat import run as training_part
from benchmarks.targets import run as targets_part

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

Names = Annotated[list[str] | None, typer.Argument(help="Only these rows; by default all.")]


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Measure everything where no part is named."""
    if context.invoked_subcommand is None:
        import_part.run()
        forward_part.run()
        scaling_part.run()
        export_part.run()


@app.command()
def export(names: Names = None, rounds: int = 3) -> None:
    """Time and memory from module to file, against torch.onnx.export and against torch.export alone."""
    export_part.run(names, rounds)


@app.command()
def scaling(sizes: Annotated[list[int] | None, typer.Argument(help="Numbers of nodes, ascending.")] = None) -> None:
    """Time of each stage on graphs of 1,000, 10,000 and 100,000 nodes."""
    scaling_part.run(sizes)


@app.command("import")
def import_(rounds: int = 9) -> None:
    """Time that the import adds to that of torch."""
    import_part.run(rounds)


@app.command()
def forward(names: Names = None, rounds: int = 60) -> None:
    """Time of one call of a ClikaModule, against the original module."""
    forward_part.run(names, rounds)


@app.command()
def ptq(names: Names = None, rounds: int = 3, calls: int = 40, runtime: str = "onnxruntime") -> None:
    """Quantization against onnxruntime's and NNCF's: time, memory, latency, size and accuracy; not part of all.

    In onnxruntime, or with --runtime openvino in OpenVINO.
    """
    quantization_part.run(names, rounds, calls, runtime)


@app.command()
def qat(names: Names = None, rounds: int = 9) -> None:
    """One step of quantization-aware training, compared with float, NNCF and torchao; not part of all."""
    training_part.run(names, rounds)


@app.command()
def pruning(names: Names = None) -> None:
    """Four models with half of their channels removed: latency, size and MACs relative to the originals; not in all."""
    pruning_part.run(names)


@app.command()
def digits(names: Names = None, seeds: int = digits_part.SEEDS) -> None:
    """Accuracy on handwritten digits after each compression and training; not part of all."""
    digits_part.run(names, seeds)


@app.command()
def efficientnet(rounds: int = efficientnet_part.ROUNDS, crops: int = efficientnet_part.TEST_CROPS) -> None:
    """EfficientNet-Lite0 with ImageNet weights, float against INT8: accuracy, size and latency; not part of all."""
    efficientnet_part.run(rounds, crops)


@app.command()
def checkpoints(names: Names = None, rounds: int = 9) -> None:
    """Size of saved modules relative to their weights, and load time relative to safetensors; not part of all."""
    checkpoints_part.run(names, rounds)


@app.command()
def targets(names: Names = None) -> None:
    """Twenty architectures for TensorRT and OpenVINO: violations, planned and actual precision; not part of all."""
    targets_part.run(names)


@app.command()
def report(names: Names = None, rounds: int = 5) -> None:
    """Pages of reports: size, and time until headless Chromium has drawn them; needs Chromium, not part of all."""
    report_part.run(names, rounds)


@app.command()
def attention(names: Names = None) -> None:
    """INT8 matrix products of attention, in OpenVINO and ONNX Runtime: latency and SQNR; not part of all."""
    attention_part.run(names)


if __name__ == "__main__":
    app()
