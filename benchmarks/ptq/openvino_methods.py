"""Export methods for OpenVINO's own files: float, and the two presets of NNCF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from clika_ref_openvino.core import core

from benchmarks.ptq.prepared_subjects import Batch
from benchmarks.ptq.quantizers import export_for_peer, quantize_by_nncf


def export_float(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Convert the float file of PyTorch's exporter, which NNCF quantizes."""
    _save(_load_float_model(model, calibration, path), path)


def export_with_nncf(
    model: torch.nn.Module, calibration: list[Batch], path: Path, *, for_transformers: bool = False, **_: Any
) -> None:
    """Quantize with NNCF's default preset, or with its preset for transformers."""
    float_model = _load_float_model(model, calibration, path)
    _save(quantize_by_nncf(float_model, calibration, for_transformers=for_transformers), path)


def _load_float_model(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Any:
    return core().read_model(str(export_for_peer(model, calibration, path)))


def _save(model: Any, path: Path) -> None:
    import openvino  # noqa: PLC0415 - as in `quantizers.compile_quantized`

    openvino.save_model(model, str(path), compress_to_fp16=False)
