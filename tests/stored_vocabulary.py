"""The names in saved files: collected from the code, and pinned in ``stored_vocabulary.json``.

Run this file to pin new names, or all names after `clika_ref.serialization.container.FILE_FORMAT` was raised.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, DeploymentSettings_OpenVINO_ONNX
from clika_ref.core.registry import load_registry
from clika_ref.lora.adapters import ADAPTER_SCOPE
from clika_ref.pruning.masks import MASK_PREFIX
from clika_ref.quantization.calibration.observer_search import OBSERVER_CANDIDATES
from clika_ref.quantization.qat.learned_scales import LOG_SCALE_SCOPES
from clika_ref.serialization.class_lookup import class_name
from clika_ref.serialization.container import FILE_FORMAT
from clika_ref.serialization.vocabulary import StoredName
from clika_ref.settings.compile_options import (
    ClikaCompileOptions,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
)
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

PINNED_FILE = Path(__file__).with_suffix(".json")

PINNED_PLUGINS = {"clika-ref-aten"}
"""Distributions whose operators are in saved graphs: passes of others run on clones only."""

SETTINGS = (ClikaCompileOptions, QuantizationSettings, LayerQuantizationSettings, LoraSettings)

DEPLOYMENTS = (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    DeploymentSettings_TensorRT_LLM_ONNX,
)


def collect() -> dict[str, Any]:
    """Return the names that the code writes, sorted, by table."""
    operators = [o for p in load_registry().plugins if p.distribution in PINNED_PLUGINS for o in p.operators]
    return {
        **{kind.__name__: sorted(kind) for kind in StoredName.__subclasses__()},
        **{kind.__name__: sorted(field.name for field in fields(kind)) for kind in SETTINGS},
        "deployments": sorted(class_name(kind) for kind in DEPLOYMENTS),
        "targets": sorted(kind.target for kind in DEPLOYMENTS),
        "state dict": sorted({ADAPTER_SCOPE, MASK_PREFIX.rstrip("."), *LOG_SCALE_SCOPES}),
        "observers": sorted(OBSERVER_CANDIDATES),
        "traits": sorted({o.trait.kind for o in operators}),
        "operators": sorted(f"{o.name}({', '.join(sorted(o.attributes))})" for o in operators),
    }


def read_pinned() -> dict[str, Any]:
    """Return the pinned names, and the file format that they are valid for."""
    return json.loads(PINNED_FILE.read_text())


def find_removed(pinned: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the pinned names that the code no longer has, each with its table."""
    tables = pinned.keys() - {"format"}
    return sorted(f"{table}: {name}" for table in tables for name in {*pinned[table]} - {*found.get(table, ())})


def find_added(pinned: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names of the code that are not pinned, each with its table."""
    return sorted(f"{table}: {name}" for table, names in found.items() for name in {*names} - {*pinned.get(table, ())})


def main() -> None:
    """Pin the names of the code.

    Raises:
        SystemExit: a pinned name was removed or renamed, and the file format is the same.
    """
    found = collect()
    if PINNED_FILE.exists():
        pinned = read_pinned()
        removed = find_removed(pinned, found)
        if removed and pinned["format"] == FILE_FORMAT:
            names = "\n  ".join(removed)
            message = f"names of file format {FILE_FORMAT} are missing:\n  {names}\nRaise FILE_FORMAT, or restore them."
            raise SystemExit(message)
    PINNED_FILE.write_text(json.dumps({"format": FILE_FORMAT, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
