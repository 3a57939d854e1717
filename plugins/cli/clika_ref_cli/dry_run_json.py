"""The JSON output of ``clika-ref compile --dry-run --json``: the same facts as in the printed tables."""

from __future__ import annotations

from typing import Any

import clika_ref
from clika_ref.compiled.lowering import target_for
from clika_ref.core.registry import load_registry
from clika_ref.export.dry_run import count_operators
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref_cli.graphs import describe_module

GRAPH_FACTS = ("name", "inputs", "outputs", "symbols", "guards", "weights_bytes")


def dry_run_as_json(module: clika_ref.ClikaModule, deployment: BaseDeploymentSettings) -> dict[str, Any]:
    """Return the result of a dry run as plain data: operators with their support by the target, and facts of the graph.

    Raises:
        TargetError: no plugin provides the target.
    """
    target, graph = target_for(deployment, load_registry()), describe_module(module).as_json()
    operators = [
        {"operator": name, "nodes": count, "unsupported_reason": reason}
        for name, count, reason in count_operators(module.graph, target)
    ]
    return {"target": target.name, "operators": operators, **{key: graph[key] for key in GRAPH_FACTS}}
