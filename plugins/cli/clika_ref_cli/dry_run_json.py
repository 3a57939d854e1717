"""The JSON output of ``clika-ref compile --dry-run --json``: the same facts as the printed tables."""

from __future__ import annotations

from typing import Any

import clika_ref
from clika_ref.compiled.lowering import target_for
from clika_ref.core.registry import load_registry
from clika_ref.export.dry_run import count_operators
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref_cli.graphs import module_graph

GRAPH_FACTS = ("name", "inputs", "outputs", "symbols", "guards", "weights_bytes")


def dry_run_as_json(module: clika_ref.ClikaModule, deployment: BaseDeploymentSettings) -> dict[str, Any]:
    """Return the result of a dry run as plain data: operators with their support by the target, and facts of the graph.

    Raises:
        TargetError: no plugin provides the target.
    """
    target, graph = target_for(deployment, load_registry()), module_graph(module).as_json()
    operators = [
        {"operator": name, "nodes": count, "refusal": refusal}
        for name, count, refusal in count_operators(module.graph, target)
    ]
    return {"target": target.name, "operators": operators, **{key: graph[key] for key in GRAPH_FACTS}}
