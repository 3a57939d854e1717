"""The roads from a module to OpenVINO's own files: ours, and NNCF's two presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.ptq.quantizers import by_nncf, compile_quantized, export_float
from benchmarks.ptq.subjects import Batch


def export_with_clika_ref(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Compile for OpenVINO with the default settings, and export."""
    from clika_ref import DeploymentSettings_OpenVINO_ONNX  # noqa: PLC0415 - a road's memory is its own

    compile_quantized(model, calibration, DeploymentSettings_OpenVINO_ONNX()).clika_export(path)


def floating(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Convert what PyTorch's exporter writes in float, which is where NNCF begins."""
    _save(_load_float_model(model, calibration, path), path)


def nncf(
    model: torch.nn.Module, calibration: list[Batch], path: Path, *, for_transformers: bool = False, **_: Any
) -> None:
    """Quantize by NNCF's default preset, or by its preset for transformers."""
    _save(by_nncf(_load_float_model(model, calibration, path), calibration, for_transformers=for_transformers), path)


def _load_float_model(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Any:
    import openvino  # noqa: PLC0415 - as in `export_with_clika_ref`

    return openvino.Core().read_model(str(export_float(model, calibration, path)))


def _save(model: Any, path: Path) -> None:
    import openvino  # noqa: PLC0415 - as in `export_with_clika_ref`

    openvino.save_model(model, str(path), compress_to_fp16=False)
