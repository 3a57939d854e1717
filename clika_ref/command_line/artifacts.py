"""ONNX files, ours or anybody's: their inputs and outputs, and copies whose nodes have names by which targets tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from clika_ref.core.errors import ModelError
from clika_ref.core.targets import Artifact
from clika_ref.onnx_emission.emission import PRODUCER, SCOPE


@dataclass(frozen=True)
class Owner:
    """What nodes of a file belong to: a node of the graph that was written; in another's file the node itself."""

    name: str
    scope: str
    operator: str


def read_onnx(path: Path) -> Any:
    """Return a model, without weights that lie beside it.

    Raises:
        ModelError: the file cannot be read as one.
    """
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:
        msg = f"{path} cannot be read as an ONNX file: {str(error).rstrip('.')}; is it one, and whole?"
        raise ModelError(msg) from error


def artifact_of(path: Path, target: str) -> Artifact:
    """Return a file as the artifact of a target.

    Raises:
        ModelError: the file cannot be read as an ONNX file.
    """
    graph = read_onnx(path).graph
    held = {tensor.name for tensor in graph.initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in held)
    return Artifact(path, target, inputs, tuple(value.name for value in graph.output))


def with_names(path: Path, folder: Path) -> tuple[Path, Mapping[str, Owner]]:
    """Return a file in which the name of each node begins with that of its owner, and the owners by these names.

    Files of ours are so. Of another's file a copy is made, as targets tell of owners, which have no slash.

    Args:
        path: of the file.
        folder: where to write the copy.

    Raises:
        ModelError: the file cannot be read as an ONNX file.
    """
    model, owners = read_onnx(path), dict[str, Owner]()
    if model.producer_name == PRODUCER:
        for node in model.graph.node:
            name = node.name.rpartition("/")[0]
            scope = next((entry.value for entry in node.metadata_props if entry.key == SCOPE), "")
            owners.setdefault(name, Owner(name, scope, node.op_type))
        return path, owners
    for number, node in enumerate(model.graph.node):
        owners[f"node_{number}"] = Owner(node.name or node.op_type, "", node.op_type)
        node.name = f"node_{number}/{node.op_type}"
    onnx.load_external_data_for_model(model, str(path.parent))
    copy = folder / path.name
    onnx.save(model, str(copy))
    return copy, owners
