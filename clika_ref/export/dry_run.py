"""The report of a dry run: operator counts, dynamic dims, guards, and nodes that the target does not support."""

from __future__ import annotations

from collections import Counter

from clika_ref.compiled.lowering import target_for
from clika_ref.core.errors import format_count
from clika_ref.core.ir import Graph, walk
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.quantization.decision import THRESHOLD_TABLE_TITLE, Quantization
from clika_ref.reporting.console import format_size
from clika_ref.reporting.log import CompilationLog
from clika_ref.reporting.tables import print_table
from clika_ref.settings.compile_options import BaseDeploymentSettings, DeploymentSettings_ONNXRuntime_ONNX


def count_operators(graph: Graph, target: Target) -> list[tuple[str, int, str | None]]:
    """Return each operator of a graph, most frequent first, with its count and the reason if the target rejects it."""
    counts = Counter(node.op.name for node in walk(graph))
    refusals = {node.op.name: reason for node in walk(graph) if (reason := target.unsupported_reason(node)) is not None}
    return [(name, count, refusals.get(name)) for name, count in counts.most_common()]


def report_dry_run(
    graph: Graph,
    registry: Registry,
    deployment: BaseDeploymentSettings | None,
    log: CompilationLog,
    quantization: Quantization | None = None,
) -> None:
    """Print and log the effects of compiling this graph for the target; write no file."""
    target = target_for(deployment or DeploymentSettings_ONNXRuntime_ONNX(), registry)
    rows = [(name, count, refusal or "yes") for name, count, refusal in count_operators(graph, target)]
    print_table(["operator", "nodes", f"runs in {target.name}"], rows, title=f"Dry run of {graph.name}")
    for name, count, answer in rows:
        log.detail(f"Dry run: {name} x {count}, runs in {target.name}: {answer}")
    weights = sum(v.data.nbytes for v in graph.constants.values() if v.data is not None)
    log.show(f"{format_count(len(graph), 'node')}, {format_size(weights)} of weights")
    for symbol in graph.symbols.values():
        log.show(f"Dynamic: {symbol}")
    for guard in graph.guards:
        log.show(f"Guard: {guard}")
    if quantization is not None:
        layers, others = quantization.table, quantization.prediction_table
        print_table([*layers.columns], layers.cells(), title="Predicted quantization")
        print_table([*others.columns], others.cells(), title=THRESHOLD_TABLE_TITLE)
