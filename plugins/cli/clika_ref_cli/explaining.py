"""The output of ``clika-ref explain``: the precision of each node in a runtime, or the facts of an operator."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clika_ref.compiled.lowering import target_for
from clika_ref.core.registry import build_registry, load_registry
from clika_ref.export.explanation import NOT_REPORTED, Explanation
from clika_ref.reporting.tables import render_text_table
from clika_ref_cli.arguments import ModelKind, find_model_kind, load_compiled
from clika_ref_cli.artifacts import (
    NodeOwner,
    find_file_targets,
    make_artifact,
    name_nodes_by_owner,
    open_target_file,
)
from clika_ref_cli.command_settings import deployment_settings_for
from clika_ref_cli.data import read_calls
from clika_ref_cli.output import show_spinner
from clika_ref_cli.plugin_facts import find_operator, list_operator_facts, load_installed_plugins

FILE_SUFFIXES = (".onnx", ".xml", ".clika", ".safetensors", ".pt", ".pth", ".py")
"""Suffixes that mark an argument as a file, whether it exists or not."""

IGNORED_OPERATORS = ("QuantizeLinear", "DequantizeLinear", "Constant")
"""Operators that do not belong to the model's computation."""


@dataclass(frozen=True)
class FileExplanation:
    """How a runtime executes a file, which contains no quantization plan; prints as a table."""

    target: str
    nodes: Sequence[dict[str, Any]]

    def __str__(self) -> str:
        rows = [(n["scope"] or n["name"], n["operator"], n["runs"], n["reason"]) for n in self.nodes]
        return f"{render_text_table(('node', 'operator', 'runs in', 'reason'), rows)}\n{self.target}"


def is_model(subject: str) -> bool:
    """Whether an argument names a model rather than an operator: a path, a file suffix, or a single colon."""
    path, is_factory = Path(subject), ":" in subject and "::" not in subject
    return path.exists() or "/" in subject or is_factory or path.suffix.lower() in FILE_SUFFIXES


def explain_operator(text: str) -> list[tuple[str, str]]:
    """Return the facts of an operator as (title, text).

    Raises:
        MisuseError: there is no such operator; the message suggests similar names.
    """
    # Use only plugins that load: a broken plugin must not hide the operators of others.
    registry = build_registry(load_installed_plugins().plugins)
    return list(list_operator_facts(registry, find_operator(registry, text)))


def explain_model(text: str, inputs: Sequence[str], target: str | None) -> Explanation | FileExplanation:
    """Return how the runtime of a target executes each node.

    Raises:
        MisuseError: the argument names no model, or no plugin provides the target.
        ModelError: the model cannot be compiled or loaded.
        TargetError: the target does not support a node, or its runtime is missing.
    """
    if find_model_kind(text, inputs) in (ModelKind.ONNX, ModelKind.TARGET_FILE):
        return _explain_file(Path(text), target)
    module = load_compiled(text, [*read_calls(inputs)])
    with show_spinner("Explaining"):
        return module.clika_explain(None if target is None else deployment_settings_for(target))


def _explain_file(path: Path, name: str | None) -> FileExplanation:
    own = next(iter(find_file_targets(path)), None)
    target = target_for(deployment_settings_for(name or own), load_registry())
    with show_spinner("Explaining"), tempfile.TemporaryDirectory() as folder:
        if own is None:
            copy, owners = name_nodes_by_owner(path, Path(folder))
            artifact = make_artifact(copy, target.name)
        else:
            opened = open_target_file(path, target, Path(folder))
            artifact = opened.artifact
            owners = {key: NodeOwner(name, "", op_type) for key, (name, op_type) in opened.nodes.items()}
        runs = target.explain(artifact)
    nodes: list[dict[str, Any]] = []
    for key, owner in owners.items():
        if owner.operator not in IGNORED_OPERATORS:
            precision, _, reason = runs.get(key, NOT_REPORTED).partition(": ")
            known = {**asdict(owner), "runs": precision, "reason": reason}
            nodes.append({**known, "macs": None, "planned": None, "is_between_int8": None, "time_share": None})
    return FileExplanation(target.describe_runtime(), nodes)


def explanation_as_json(explanation: Explanation | FileExplanation) -> dict[str, Any]:
    """Return an explanation as plain data; for a file, the plan and the MACs are unknown."""
    if isinstance(explanation, FileExplanation):
        unknown = {"share": None, "planned_share": None, "not_quantized": None, "speed": None}
        return {"target": explanation.target, "nodes": explanation.nodes, **unknown}
    return {
        "target": explanation.target,
        "nodes": [asdict(node) for node in explanation.nodes],
        "share": explanation.share(),
        "planned_share": explanation.share(planned=True),
        "not_quantized": [node.name for node in explanation.not_quantized],
        "speed": [
            {"threads": each.threads, "ratio": each.ratio, "is_faster": each.is_faster} for each in explanation.speed
        ],
    }
