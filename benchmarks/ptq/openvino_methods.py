"""Methods from a module to OpenVINO's own files: clika-ref, and NNCF's two presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.ptq.quantizers import compile_quantized, export_float, quantize_by_nncf
from benchmarks.ptq.subjects import Batch


def export_with_clika_ref(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Compile for OpenVINO with the default settings, and export."""
    from clika_ref import DeploymentSettings_OpenVINO_ONNX  # noqa: PLC0415 - each method is charged for its own memory

    compile_quantized(model, calibration, DeploymentSettings_OpenVINO_ONNX()).clika_export(path)


def export_floating(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Convert the float model that PyTorch's exporter writes, which NNCF starts from."""
    _save(_load_float_model(model, calibration, path), path)


def export_nncf(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with NNCF's default algorithms."""
    _save(quantize_by_nncf(_load_float_model(model, calibration, path), calibration, for_transformers=False), path)


def export_nncf_transformer(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with NNCF's preset for transformers."""
    _save(quantize_by_nncf(_load_float_model(model, calibration, path), calibration, for_transformers=True), path)


def _load_float_model(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Any:
    import openvino  # noqa: PLC0415 - as in `export_with_clika_ref`

    return openvino.Core().read_model(str(export_float(model, calibration, path)))


def _save(model: Any, path: Path) -> None:
    import openvino  # noqa: PLC0415 - as in `export_with_clika_ref`

    openvino.save_model(model, str(path), compress_to_fp16=False)
