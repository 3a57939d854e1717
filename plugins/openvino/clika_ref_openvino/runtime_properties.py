"""The runtime properties that a file is verified with: stored in it, and next to it for other programs.

By default, OpenVINO 2026.4 rounds the inputs of layers with low-bit weights to 8 bits, and computes in bfloat16 on
processors that support it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from clika_ref.targets.file_suffixes import companion_path

DEVICE = "CPU"

GROUP_SIZE_KEY = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""The property with the number of neighbors in an input that share a scale; 0 computes in float."""

RUNTIME_SECTION, ONNX_SECTION = "runtime_options", "framework"
"""Sections of a model's runtime information: properties that the runtime itself applies, and metadata of ONNX."""

CONFIG_SUFFIX = ".openvino.json"
"""Suffix of the file next to an artifact."""


def properties_of(group_size: int | str) -> dict[str, str]:
    """Return the properties for files with a group size: they compute in the types of the file."""
    return {"INFERENCE_PRECISION_HINT": "f32", GROUP_SIZE_KEY: str(group_size)}


def session_options(model: Any) -> dict[str, Any]:
    """Return the options to compile a model with: its own group size, and the threads of this process."""
    return {**properties_of(read_group_size(model)), "INFERENCE_NUM_THREADS": torch.get_num_threads()}


def read_group_size(model: Any) -> str:
    """Return the group size that is stored in a model, ``"0"`` if there is none."""
    places = ([section, GROUP_SIZE_KEY] for section in (RUNTIME_SECTION, ONNX_SECTION))
    return next((str(model.get_rt_info(place).astype(str)) for place in places if model.has_rt_info(place)), "0")


def store_group_size(model: Any, group_size: int) -> None:
    """Store a group size in a model of OpenVINO's own format, where the runtime itself reads it."""
    model.set_rt_info(str(group_size), [RUNTIME_SECTION, GROUP_SIZE_KEY])


def store_group_size_in_onnx(model: ir.Model, group_size: int) -> None:
    """Store a group size in the metadata of an ONNX model, where only `read_group_size` reads it."""
    model.metadata_props[GROUP_SIZE_KEY] = str(group_size)


def write_config(path: Path, group_size: int) -> Mapping[str, Any]:
    """Write the properties of a file next to it, and return the facts of its artifact about them.

    Source: ``load_config`` in ``openvino/tools/benchmark/utils/utils.py`` of openvino 2026.4, for the format.

    Args:
        path: path of the artifact.
        group_size: its group size.
    """
    config = companion_path(path, CONFIG_SUFFIX)
    config.write_text(json.dumps({DEVICE: properties_of(group_size)}, indent=1) + "\n", encoding="utf-8")
    note = f"other programs must set the properties in {config.name}, as benchmark_app -load_config {config.name} does"
    return {"config_file": config.name, "notes": (note,)}
