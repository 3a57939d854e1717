"""ONNX files, ours or anybody's: their inputs and outputs, and copies whose nodes have names by which targets tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from clika_ref.core.errors import ModelError
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Artifact, Target
from clika_ref.onnx_emission.emission import PRODUCER, SCOPE
from clika_ref.opened_files import OpenedFile, opener_of, suffixes_of


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
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        msg = f"{path} cannot be read as an ONNX file: {str(error).rstrip('.')}; is it one, and whole?"
        raise ModelError(msg) from error
    if not model.HasField("graph"):
        msg = f"{path} holds no graph; is it an ONNX file, and whole?"
        raise ModelError(msg)
    return model


def targets_opening(path: Path) -> list[str]:
    """Return the names of targets whose own form a file has, other than ONNX."""
    targets = load_registry().targets.values()
    opening = [target for target in targets if opener_of(target) is not None]
    return [target.name for target in opening if path.suffix in {*suffixes_of(target)} - {".onnx"}]


def opened_file(path: Path, target: Target, folder: Path) -> OpenedFile:
    """Return what is known of a file of a target's own form.

    Args:
        path: of the file.
        target: which is to read it.
        folder: where to write a copy.

    Raises:
        ModelError: it is the form of another target.
        TargetError: the runtime is missing, or cannot read the file.
    """
    open_file, those = opener_of(target), targets_opening(path)
    if open_file is None or target.name not in those:
        msg = f"{path} is a file for {' and '.join(those)}, and none that {target.name} reads"
        raise ModelError(msg)
    return open_file(path, folder)


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
