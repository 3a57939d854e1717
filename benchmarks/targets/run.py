"""Quantize each architecture once, export it for TensorRT and OpenVINO, and compare planned and real precision."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import Names, run_in_fresh_process
from benchmarks.targets.architectures import ARCHITECTURES

# isort: split
import torch

from clika_ref.reporting.tables import print_table

COLUMNS = ("architecture", "target", "rule violations", "MACs planned in INT8", "planned layers in INT8")
COUNTED_OPERATORS = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"})
"""Operators of the layers that are counted."""


def run(names: Names = None) -> None:
    """Export 20 architectures for TensorRT and OpenVINO: violations, planned and real precision."""
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names or ARCHITECTURES:
        results[name] = run_in_fresh_process("benchmarks.targets.run", name)
        print(f"{name}: {results[name]}", file=sys.stderr)
    rows = [(name, *found.values()) for name, targets in results.items() for found in targets]
    print_table(
        COLUMNS,
        [[_format_cell(cell) for cell in row] for row in rows],
        title="Quantized once, exported for both targets",
    )
    for number, target in enumerate(("tensorrt, emulated", "openvino")):
        found = [targets[number] for targets in results.values()]
        print(f"{target}: {sum(f['violations'] for f in found)} rule violations in {len(found)} architectures")
        print(f"{target}: at least {min(f['planned'] for f in found):.1%} of the MACs are planned in INT8")
        print(f"{target}: at least {min(f['in INT8'] for f in found):.1%} of the planned layers run in INT8")


def _format_cell(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main(name: str) -> list[dict[str, Any]]:
    """Return the results of one architecture for each target."""
    from clika_ref import (  # noqa: PLC0415 - printing the table does not need it
        DeploymentSettings_OpenVINO_ONNX,
        DeploymentSettings_TensorRT_ONNX,
        QuantizationSettings,
        clika_compile,
    )

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]()
    calibration = [architecture.inputs(4) for _ in range(4)]
    deployments = (DeploymentSettings_TensorRT_ONNX(), DeploymentSettings_OpenVINO_ONNX())
    module = clika_compile(
        architecture.build().eval(),
        tracing_inputs=[architecture.inputs(1), calibration[0]],
        calibration_inputs=calibration,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=deployments[0],
    ).eval()
    return [_measure_target(module, deployment) for deployment in deployments]


def _measure_target(module: Any, deployment: Any) -> dict[str, Any]:
    from clika_ref.compiled.lowering import target_for  # noqa: PLC0415 - as in `main`
    from clika_ref.core.registry import load_registry  # noqa: PLC0415 - as in `main`

    target = target_for(deployment, load_registry())
    with TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx", deployment_settings=deployment)
        violations = len(target.check(artifact.path))
    explained = module.clika_explain(deployment)
    layers = [node for node in explained.nodes if node.operator in COUNTED_OPERATORS]
    planned = [node for node in layers if node.planned != "float"]
    return {
        "target": explained.target,
        "violations": violations,
        "planned": sum(node.macs for node in planned) / max(sum(node.macs for node in layers), 1),
        "in INT8": 1 - sum(node in explained.not_quantized for node in planned) / max(len(planned), 1),
    }
