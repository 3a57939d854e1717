"""What a dry run tells: operators and how often they occur, dynamic sides, guards, and what the target would refuse."""

from __future__ import annotations

from collections import Counter

from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.exporting.export import target_for
from clika_ref.quantization.decision import WHAT_IF_TITLE, Quantization
from clika_ref.reporting.log import CompilationLog
from clika_ref.reporting.tables import print_table
from clika_ref.settings import BaseDeploymentSettings, DeploymentSettings_ONNXRuntime_ONNX


def report_dry_run(
    graph: Graph,
    registry: Registry,
    deployment: BaseDeploymentSettings | None,
    log: CompilationLog,
    quantization: Quantization | None = None,
) -> None:
    """Print and log what compiling this graph for the target would do; nothing is written."""
    target = target_for(deployment or DeploymentSettings_ONNXRuntime_ONNX(), registry)
    counts = Counter(node.op.name for node in graph.nodes)
    refusals = {node.op.name: reason for node in graph.nodes if (reason := target.refusal(node)) is not None}
    rows = [(name, count, refusals.get(name, "yes")) for name, count in counts.most_common()]
    print_table(["operator", "nodes", f"runs in {target.name}"], rows, title=f"Dry run of {graph.name}")
    for name, count, answer in rows:
        log.detail(f"Dry run: {name} x {count}, runs in {target.name}: {answer}")
    weights = sum(v.data.nbytes for v in graph.constants.values() if v.data is not None)
    log.say(f"{len(graph):,} nodes, {weights / 1e6:,.1f} MB of weights")
    for symbol in graph.symbols.values():
        log.say(f"Dynamic: {symbol}")
    for guard in graph.guards:
        log.say(f"Guard: {guard}")
    if quantization is not None:
        layers, others = quantization.table, quantization.what_if_table
        print_table([*layers.columns], layers.cells(), title="What would be quantized")
        print_table([*others.columns], others.cells(), title=WHAT_IF_TITLE)
