"""Quantize each architecture once, and write it for TensorRT and OpenVINO: rules broken, what is planned, what runs."""

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

COLUMNS = ("architecture", "target", "rules broken", "planned", "runs as planned")
JUDGED = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"})
"""Layers whose products are counted."""


def run(names: Names = None) -> None:
    """Twenty architectures for TensorRT and OpenVINO: rules broken, what is planned and run; not part of all."""
    every: dict[str, list[dict[str, Any]]] = {}
    for name in names or ARCHITECTURES:
        every[name] = run_in_fresh_process("benchmarks.targets.run", name)
        print(f"{name}: {every[name]}", file=sys.stderr)
    rows = [(name, *found.values()) for name, targets in every.items() for found in targets]
    print_table(
        COLUMNS, [[_format_cell(cell) for cell in row] for row in rows], title="quantized once, written for both"
    )
    for number, target in enumerate(("tensorrt, emulated", "openvino")):
        found = [targets[number] for targets in every.values()]
        print(f"{target}: {sum(f['broken'] for f in found)} rules broken by {len(found)} architectures")
        print(f"{target}: at least {min(f['planned'] for f in found):.1%} of products planned in integers")
        print(f"{target}: at least {min(f['runs'] for f in found):.1%} of what is planned runs so")


def _format_cell(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def main(name: str) -> list[dict[str, Any]]:
    """Return what becomes of one architecture for each target."""
    from clika_ref import (  # noqa: PLC0415 - the table needs none of it
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
    return [_of_target(module, deployment) for deployment in deployments]


def _of_target(module: Any, deployment: Any) -> dict[str, Any]:
    from clika_ref.compiled.lowering import target_for  # noqa: PLC0415
    from clika_ref.core.registry import load_registry  # noqa: PLC0415 - as above

    target = target_for(deployment, load_registry())
    with TemporaryDirectory() as folder:
        artifact = module.clika_export(Path(folder) / "model.onnx", deployment_settings=deployment)
        check = getattr(target, "check", None)
        broken = len(check(artifact.path)) if check is not None else 0
    explained = module.clika_explain(deployment)
    layers = [node for node in explained.nodes if node.operator in JUDGED]
    planned = [node for node in layers if node.planned != "float"]
    return {
        "target": explained.target,
        "broken": broken,
        "planned": sum(node.macs for node in planned) / max(sum(node.macs for node in layers), 1),
        "runs": 1 - sum(node in explained.not_quantized for node in planned) / max(len(planned), 1),
    }
