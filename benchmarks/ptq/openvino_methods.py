"""The roads from a module to OpenVINO's own files: ours, and NNCF's two presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.ptq.quantizers import by_nncf, export_float
from benchmarks.ptq.subjects import Batch


def floating(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Convert what PyTorch's exporter writes in float, which is where NNCF begins."""
    _save(_load_float_model(model, calibration, path), path)


def nncf(
    model: torch.nn.Module, calibration: list[Batch], path: Path, *, for_transformers: bool = False, **_: Any
) -> None:
    """Quantize by NNCF's default preset, or by its preset for transformers."""
    _save(by_nncf(_load_float_model(model, calibration, path), calibration, for_transformers=for_transformers), path)


def _load_float_model(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Any:
    import openvino  # noqa: PLC0415 - as in `quantizers.compile_quantized`

    return openvino.Core().read_model(str(export_float(model, calibration, path)))


def _save(model: Any, path: Path) -> None:
    import openvino  # noqa: PLC0415 - as in `quantizers.compile_quantized`

    openvino.save_model(model, str(path), compress_to_fp16=False)
