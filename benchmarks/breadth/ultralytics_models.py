"""Architectures of ultralytics, built from their yaml files."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import IMAGES, Architecture

DETECTORS = (
    *("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-ghost", "yolov9t", "yolov10n", "yolo11n", "yolo12n"),
    *("yolo26n", "rtdetr-l"),
)
OTHER_TASKS = (
    *(f"{family}-{task}" for family in ("yolov8n", "yolo11n", "yolo26n") for task in ("seg", "pose", "obb", "cls")),
    "yolov8n-worldv2",
)


def _build(name: str) -> nn.Module:
    import ultralytics  # noqa: PLC0415 - only the process of an entry needs it

    torch.manual_seed(0)
    family = ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO
    return family(f"{name}.yaml").model


def _make_images(batch: int, height: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.rand(batch, 3, height, width)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    return {
        name: Architecture(functools.partial(_build, name), _make_images, IMAGES, "batch, height, width")
        for name in (*DETECTORS, *OTHER_TASKS)
    }
