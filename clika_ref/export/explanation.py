"""Explain how a runtime executes a module: for each node, the planned and the actual precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.compiled.lowering import check_supported
from clika_ref.compiled.runners import compile_temporarily
from clika_ref.core.artifacts import Artifact
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.registry import Registry
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION, Target
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.export import make_export_graph
from clika_ref.export.input_rounding import find_low_bit_layers
from clika_ref.quantization.algorithms.macs import MacCounter
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import non_bias_operands
from clika_ref.reporting.tables import HasTables, Table

NOT_REPORTED = "not reported by the runtime"
"""The precision of a node that the runtime does not report, or for which it names no integer kernel."""

QDQ_OPERATORS = ("quantize", "dequantize")
"""The operators at the borders of quantized regions."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one node of the exported graph."""

    name: str
    """Name of the node in the exported graph."""
    scope: str
    """Path of its module."""
    operator: str
    """Name of its operator."""
    macs: int
    """MACs on the example; 0 for a node that is no layer. For a transposed convolution, the zeros inserted between its
    inputs are counted.
    """
    planned: str
    """``int8``, ``int4 weights`` or ``int8 weights``, or ``float``."""
    runs: str
    """The precision in the runtime, in the same terms; ``fused`` as a part of another node, or `NOT_REPORTED`."""
    reason: str
    """Why it runs in float, if the plan or the runtime gives a reason."""

    @property
    def is_in_table(self) -> bool:
        """Whether tables show it: a layer, a node planned as quantized, or one between quantized nodes."""
        return bool(self.macs or self.reason) or self.planned != FLOAT_PRECISION


EXPLANATION_COLUMNS: Mapping[str, Callable[[NodeFacts], object]] = {
    "layer": lambda fact: fact.scope or fact.name,
    "operator": lambda fact: fact.operator,
    "MACs": lambda fact: fact.macs or None,
    "planned": lambda fact: fact.planned,
    "runs in": lambda fact: fact.runs,
    "reason": lambda fact: fact.reason,
}


@dataclass(frozen=True, repr=False)
class Explanation(HasTables):
    """How a target executes each node; prints as a table of layers and other quantized nodes."""

    target: str
    nodes: Sequence[NodeFacts]
    """The facts of each node, in order."""

    def share(self, *, planned: bool = False) -> float:
        """Return the fraction of all MACs that run quantized, or with ``planned`` those that were planned to."""
        total = sum(n.macs for n in self.nodes)
        floats = (FLOAT_PRECISION, FUSED_PRECISION, NOT_REPORTED)
        found = sum(n.macs for n in self.nodes if (n.planned if planned else n.runs) not in floats)
        return found / total if total else 0.0

    @property
    def not_quantized(self) -> Sequence[NodeFacts]:
        """The nodes that were planned as quantized but run in float, or that the runtime does not report."""
        return [n for n in self.nodes if n.planned != FLOAT_PRECISION and n.runs in (FLOAT_PRECISION, NOT_REPORTED)]

    @property
    def table(self) -> Table[NodeFacts]:
        """All nodes; only layers and nodes planned as quantized are printed."""
        return Table(self.nodes, EXPLANATION_COLUMNS, lambda fact: fact.is_in_table)

    def summarize(self) -> str:
        """Return how many of the nodes planned as quantized run quantized, and their share of MACs."""
        planned = sum(n.planned != FLOAT_PRECISION for n in self.nodes)
        count = planned - len(self.not_quantized)
        return (
            f"{self.target}: {count} of {planned} nodes planned as quantized run quantized, with "
            f"{self.share():.1%} of all MACs"
        )

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.summarize()


def explain(
    graph: Graph,
    plan: Plan | None,
    target: Target,
    registry: Registry,
    inputs: Sequence[torch.Tensor],
    *,
    form: ExportConfiguration,
) -> Explanation:
    """Compile a graph for a target and query its runtime about each node.

    Args:
        graph: the graph of the module.
        plan: the quantization plan; None for a float model.
        target: the target that runs it.
        registry: the plugins.
        inputs: inputs of the graph; MACs are counted for their sizes.
        form: the export configuration.

    Raises:
        ModelError: the form names an output that does not exist, or requires INT4 weights and there are none.
        TargetError: the target does not support a node, or its runtime is missing.
    """
    written = make_export_graph(graph, plan, target, registry, form)
    check_supported(written, target)
    with compile_temporarily(written, target) as file:
        return explain_artifact(written, file, plan, target, inputs)


def explain_artifact(
    written: Graph, file: Artifact, plan: Plan | None, target: Target, inputs: Sequence[torch.Tensor]
) -> Explanation:
    """Query the runtime of a target about a file.

    Args:
        written: the graph that the file was written from.
        file: the artifact.
        plan: the quantization plan; None for a float model.
        target: the target that wrote it.
        inputs: inputs of the graph; MACs are counted for their sizes.

    Raises:
        TargetError: the runtime is missing, or rejects the file.
    """
    runs = target.explain(file)
    macs, scheme = _count_macs(written, inputs), target.scheme
    planned, moving = find_planned_precisions(written, scheme), scheme.data_movement if scheme else frozenset[str]()
    facts: list[NodeFacts] = []
    for node in written.nodes:
        if node.op_type not in QDQ_OPERATORS:
            precision, _, reason = runs.get(node.name, NOT_REPORTED).partition(": ")
            plan_precision = planned.get(node, FLOAT_PRECISION)
            if precision == FUSED_PRECISION and plan_precision != FLOAT_PRECISION and node.op_type not in moving:
                precision = NOT_REPORTED  # a runtime may leave out nodes that only move integers
            if plan is not None and plan_precision == FLOAT_PRECISION:
                reason = plan.floats.get(node.name, reason)
            origin, count = node.origin.scope, macs.get(node, 0)
            facts.append(NodeFacts(node.name, origin, node.op_type, count, plan_precision, precision, reason))
    return Explanation(target.describe_runtime(), facts)


def find_planned_precisions(graph: Graph, scheme: QuantizationScheme | None) -> dict[Node, str]:
    """Return the planned precision of nodes that read only quantized operands (except biases), or a low-bit weight.

    An elementwise node with a number operand is not among them: ``x * 3`` is computed in float.
    """
    kinds = scheme.layers | scheme.elementwise | scheme.data_movement if scheme else frozenset[str]()
    elementwise = scheme.elementwise if scheme else frozenset[str]()
    read = [n for n in graph.nodes if n.op_type in kinds and all(map(_is_dequantized, non_bias_operands(n)))]
    quantized = {n: INT8_PRECISION for n in read if n.op_type not in elementwise or not any(map(_is_number, n.inputs))}
    return quantized | {node: f"int{weight.bits} weights" for node, weight in find_low_bit_layers(graph).items()}


def _is_number(operand: Any) -> bool:
    return operand is not None and not isinstance(operand, Value)


def _is_dequantized(value: Value) -> bool:
    return value.producer is not None and value.producer.op_type == QDQ_OPERATORS[1]


def _count_macs(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[Node, int]:
    """Return the MACs of each layer on the given inputs."""
    counter = MacCounter(graph, inputs)
    compute_outputs(graph, inputs, counter)
    return counter.of
