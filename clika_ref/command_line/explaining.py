"""The output of ``clika-ref explain``: the nodes that a target's runtime runs in INT8, or the facts of an operator."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clika_ref.command_line.arguments import Kind, compiled, heeding, kind_of
from clika_ref.command_line.artifacts import Owner, artifact_of, opened_file, targets_opening, with_names
from clika_ref.command_line.choices import deployment
from clika_ref.command_line.data import read_calls
from clika_ref.command_line.inspection import facts_of, find_operator, installed_plugins
from clika_ref.command_line.printed import working
from clika_ref.core.registry import build_registry, load_registry
from clika_ref.emulation import place_of
from clika_ref.explanation import UNNAMED, Explanation
from clika_ref.exporting.export import target_for
from clika_ref.reporting.tables import table_text

FILES = (".onnx", ".xml", ".clika", ".safetensors", ".pt", ".pth", ".py")
"""Suffixes that mark an argument as a file, whether it exists or not."""

BORDERS = ("QuantizeLinear", "DequantizeLinear", "Constant")
"""Operators of a file that compute nothing of the model."""


@dataclass(frozen=True)
class FileExplanation:
    """How a runtime executes a file that carries no quantization plan; prints as a table."""

    target: str
    nodes: Sequence[dict[str, Any]]

    def __str__(self) -> str:
        rows = [(n["scope"] or n["name"], n["operator"], n["runs"], n["reason"]) for n in self.nodes]
        return f"{table_text(('node', 'operator', 'runs in', 'why'), rows)}\n{self.target}"


def is_model(subject: str) -> bool:
    """Whether an argument names a model rather than an operator: a path, a file suffix, or a single colon."""
    path, is_factory = Path(subject), ":" in subject and "::" not in subject
    return path.exists() or "/" in subject or is_factory or path.suffix.lower() in FILES


def of_operator(text: str) -> list[tuple[str, str]]:
    """Return the facts of an operator as (title, text).

    Raises:
        MisuseError: there is no such operator; the message suggests similar names.
    """
    # Use only plugins that load: a broken plugin must not hide the operators of others.
    registry = build_registry(installed_plugins().plugins)
    return list(facts_of(registry, find_operator(registry, text)))


def of_model(text: str, inputs: Sequence[str], target: str | None) -> Explanation | FileExplanation:
    """Return how the runtime of a target executes each node.

    Raises:
        MisuseError: the argument names no model, or no plugin provides the target.
        ModelError: the model cannot be compiled or loaded.
        TargetError: the target does not support a node, or its runtime is missing.
    """
    if heeding(kind_of(text), text, inputs) in (Kind.ONNX, Kind.OWN):
        return _of_file(Path(text), target)
    module = compiled(text, [*read_calls(inputs)])
    with working("Explaining"):
        return module.clika_explain(None if target is None else deployment(target))


def _of_file(path: Path, name: str | None) -> FileExplanation:
    own = next(iter(targets_opening(path)), None)
    target = target_for(deployment(name or own), load_registry())
    with working("Explaining"), tempfile.TemporaryDirectory() as folder:
        if own is None:
            named, owners = with_names(path, Path(folder))
            artifact = artifact_of(named, target.name)
        else:
            found = opened_file(path, target, Path(folder))
            artifact, owners = found.artifact, {key: Owner(name, "", kind) for key, (name, kind) in found.nodes.items()}
        runs = target.explain(artifact)
    nodes: list[dict[str, Any]] = []
    for key, owner in owners.items():
        if owner.operator not in BORDERS:
            precision, _, reason = runs.get(key, UNNAMED).partition(": ")
            nodes.append({**asdict(owner), "products": None, "planned": None, "runs": precision, "reason": reason})
    return FileExplanation(place_of(target), nodes)


def as_json(found: Explanation | FileExplanation) -> dict[str, Any]:
    """Return an explanation as plain data; for a file, the plan and the MACs are unknown."""
    if isinstance(found, FileExplanation):
        return {"target": found.target, "nodes": found.nodes, "share": None, "planned_share": None, "missed": None}
    return {
        "target": found.target,
        "nodes": [asdict(node) for node in found.nodes],
        "share": found.share(),
        "planned_share": found.share(planned=True),
        "missed": [node.name for node in found.missed],
    }
