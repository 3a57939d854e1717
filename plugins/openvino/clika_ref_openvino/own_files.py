"""Open files in OpenVINO's own format: their inputs, and a copy with node names that `explaining` can report on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from clika_ref.core.artifacts import Artifact, OpenedFile
from clika_ref.core.errors import TargetError
from clika_ref_openvino.core import core

IGNORED_TYPES = frozenset({"Constant", "Parameter", "Result"})
"""Node types without computation."""

PAIR_NAMES = {"FakeQuantize": "quantize", "Convert": "dequantize"}
"""Types of quantize and dequantize nodes, with their names in `explaining`."""

DTYPES_BY_NAME = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "boolean": torch.bool,
}
"""Dtypes by OpenVINO's names."""


def open_own_file(path: Path, folder: Path, ov: Any) -> OpenedFile:
    """Open a file.

    Args:
        path: path of the ``.xml``, with its ``.bin`` next to it.
        folder: folder for the copy.
        ov: the runtime.

    Raises:
        TargetError: the runtime cannot read the file.
    """
    try:
        model = core().read_model(str(path))
    except RuntimeError as error:
        raise TargetError(f"OpenVINO {ov.__version__} cannot read {path}: {error}") from error
    nodes: dict[str, tuple[str, str]] = {}
    for number, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        if kind not in IGNORED_TYPES:
            name = f"{PAIR_NAMES.get(kind, 'node')}_{number}"
            if kind not in PAIR_NAMES:
                nodes[name] = (node.get_friendly_name(), kind)
            node.set_friendly_name(f"{name}/{kind}")
    names = [_ensure_name(port, f"output_{position}") for position, port in enumerate(model.outputs)]
    inputs = {
        _ensure_name(port, f"input_{position}"): (
            DTYPES_BY_NAME.get(port.get_element_type().get_type_name()),
            _partial_shape(port),
        )
        for position, port in enumerate(model.inputs)
    }
    copy = folder / path.name
    ov.save_model(model, str(copy), compress_to_fp16=False)
    return OpenedFile(Artifact(copy, "openvino", tuple(inputs), tuple(names)), inputs, nodes)


def _ensure_name(port: Any, otherwise: str) -> str:
    """Return the name of an input or output; sets one if it has none."""
    if not port.get_names():
        port.get_tensor().set_names({otherwise})
    return port.get_any_name()


def _partial_shape(port: Any) -> list[int | None]:
    return [dim.get_length() if dim.is_static else None for dim in port.get_partial_shape()]
