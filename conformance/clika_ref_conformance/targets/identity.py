"""Eager itself as a target: its results are correct by definition, so any failure is a bug of the suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from clika_ref.core.artifacts import Artifact, Runner
from clika_ref.core.errors import ClikaError, TargetError
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json


@dataclass(frozen=True)
class Identity(Target):
    """Write a graph as safetensors, with its JSON in the header, and run it through the interpreter."""

    name: str = "identity"

    def unsupported_reason(self, node: Node) -> str | None:  # noqa: ARG002 - Target interface
        """Return None: every node is supported."""
        return None

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:  # noqa: ARG002 - Target interface
        """Write a graph. Undeclared operators are kept in the artifact's facts, for this process only."""
        tensors = {name: v.data.contiguous().clone() for name, v in graph.constants.items() if v.data is not None}
        save_file(tensors, path, {"graph": json.dumps(graph_to_json(graph), sort_keys=True)})
        inputs = tuple(v.name for v in graph.inputs)
        outputs = tuple(v.name for v in graph.outputs)
        return Artifact(path, self.name, inputs, outputs, {"operators": {n.op.name: n.op for n in graph.nodes}})

    def load(self, artifact: Artifact) -> Runner:
        """Read a graph back.

        Raises:
            TargetError: the file is damaged.
        """
        own: Mapping[str, Operator] = artifact.facts.get("operators", {})
        try:
            with safe_open(artifact.path, "pt") as file:
                document = json.loads(file.metadata()["graph"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            graph = graph_from_json(document, lambda name: own.get(name) or _load_operators().get(name), tensors)
        except (ClikaError, SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise TargetError(
                f"cannot load {artifact.path}: it is damaged ({type(error).__name__}: {error}). Compile it again."
            ) from error

        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with torch.no_grad():
                outputs, _ = interpret(graph, [t.clone() for t in inputs])
            return [t.clone() for t in outputs]

        return run


@cache
def _load_operators() -> Mapping[str, Operator]:
    return load_registry().operators
