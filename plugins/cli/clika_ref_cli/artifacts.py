"""ONNX files from any exporter: their inputs and outputs, and copies with node names that targets can report on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from clika_ref.core.artifacts import Artifact, OpenedFile
from clika_ref.core.errors import ModelError
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.onnx_export.emission import PRODUCER_NAME, SCOPE_KEY


@dataclass(frozen=True)
class NodeOwner:
    """The owner of nodes in a file: a node of the exported graph, or the node itself in a file of another tool."""

    name: str
    scope: str
    operator: str


def read_onnx(path: Path) -> Any:
    """Load an ONNX model without its external weights.

    Raises:
        ModelError: the file cannot be read as ONNX.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise ModelError(f"cannot read {path} as ONNX: {str(error).rstrip('.')}. Give a complete ONNX file.") from error
    if not model.HasField("graph"):
        raise ModelError(f"cannot read {path} as ONNX: it contains no graph. Give a complete ONNX file.")
    return model


def find_inputs(graph: Any) -> list[Any]:
    """Return the inputs of an ONNX graph; older files list initializers among them."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


def find_file_targets(path: Path) -> list[str]:
    """Return the names of targets with a file format of their own, other than ONNX, that fits the suffix."""
    targets = [target for target in load_registry().targets.values() if target.has_own_format()]
    return [target.name for target in targets if path.suffix in {*target.suffixes} - {".onnx"}]


def open_target_file(path: Path, target: Target, folder: Path) -> OpenedFile:
    """Open a file in a target's own format.

    Args:
        path: path of the file.
        target: the target that reads it.
        folder: folder for a copy.

    Raises:
        ModelError: the file has the format of another target.
        TargetError: the runtime is missing, or cannot read the file.
    """
    supported = find_file_targets(path)
    if target.name not in supported:
        names = " or ".join(supported)
        raise ModelError(
            f"cannot open {path} with {target.name}: its format is that of {names}. Give --target {supported[0]}."
        )
    return target.open_file(path, folder)


def make_artifact(path: Path, target: str) -> Artifact:
    """Return an ONNX file as the artifact of a target.

    Raises:
        ModelError: the file cannot be read as ONNX.
    """
    graph = read_onnx(path).graph
    inputs, outputs = (tuple(value.name for value in values) for values in (find_inputs(graph), graph.output))
    return Artifact(path, target, inputs, outputs)


def name_nodes_by_owner(path: Path, folder: Path) -> tuple[Path, Mapping[str, NodeOwner]]:
    """Return a file with node names of the form ``<owner>/...``, and the owners by name.

    Files of ours already have such names. Other files are copied, since targets report by owners without a slash.

    Args:
        path: path of the file.
        folder: folder for the copy.

    Raises:
        ModelError: the file cannot be read as ONNX.
    """
    model, owners = read_onnx(path), dict[str, NodeOwner]()
    if model.producer_name == PRODUCER_NAME:
        for node in model.graph.node:
            name = node.name.rpartition("/")[0]
            scope = next((entry.value for entry in node.metadata_props if entry.key == SCOPE_KEY), "")
            owners.setdefault(name, NodeOwner(name, scope, node.op_type))
        return path, owners
    for number, node in enumerate(model.graph.node):
        owners[f"node_{number}"] = NodeOwner(node.name or node.op_type, "", node.op_type)
        node.name = f"node_{number}/{node.op_type}"
    onnx.load_external_data_for_model(model, str(path.parent))
    copy = folder / path.name
    onnx.save(model, str(copy))
    return copy, owners
