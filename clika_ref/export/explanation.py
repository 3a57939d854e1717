"""Explain how a runtime executes a module: for each node, the planned and the actual precision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clika_ref.compiled.latency import take_one_sample
from clika_ref.compiled.lowering import check_supported
from clika_ref.compiled.runners import compile_temporarily
from clika_ref.core.artifacts import Artifact
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme, is_fused
from clika_ref.core.registry import Registry
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION, Target
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.export_graph import make_export_graph, make_float_graph
from clika_ref.export.input_rounding import find_low_bit_layers
from clika_ref.export.speed import SpeedComparison, can_time, compare_speed
from clika_ref.quantization.algorithms.macs import MacCounter
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.quantization.qdq.insertion import QDQ_OPERATORS, Plan
from clika_ref.quantization.qdq.layer_weights import non_bias_operands
from clika_ref.quantization.qdq.recurrent_layers import DYNAMIC_PREFIX
from clika_ref.reporting.tables import HasTables, Table

NOT_REPORTED = "not reported by the runtime"
"""The precision of a node that the runtime does not report, or for which it names no integer kernel."""


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
    is_between_int8: bool = False
    """Whether it runs in float and has INT8 nodes before and after it, directly or beyond other float nodes."""
    time_share: float | None = None
    """Share of the time of a call; None if it was not measured."""

    @property
    def is_in_table(self) -> bool:
        """Whether tables show it: a layer, a node planned as quantized, or one between INT8 nodes."""
        return bool(self.macs or self.reason) or self.planned != FLOAT_PRECISION or self.is_between_int8


TIME_COLUMN = "time"

EXPLANATION_COLUMNS: Mapping[str, Callable[[NodeFacts], object]] = {
    "layer": lambda fact: fact.scope or fact.name,
    "operator": lambda fact: fact.operator,
    "MACs": lambda fact: fact.macs or None,
    "planned": lambda fact: fact.planned,
    "runs in": lambda fact: fact.runs,
    TIME_COLUMN: lambda fact: "" if fact.time_share is None else f"{fact.time_share:.1%}",
    "reason": lambda fact: fact.reason or "float between INT8 nodes" * fact.is_between_int8,
}


@dataclass(frozen=True, repr=False)
class Explanation(HasTables):
    """How a target executes each node; prints as a table of layers and other quantized nodes."""

    target: str
    nodes: Sequence[NodeFacts]
    """The facts of each node, in order."""
    speed: Sequence[SpeedComparison] = ()
    """Times compared with the float model; empty if they were not measured."""

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
        """All nodes; only layers, nodes planned as quantized and nodes between INT8 nodes are printed."""
        is_timed = any(node.time_share is not None for node in self.nodes)
        columns = {name: read for name, read in EXPLANATION_COLUMNS.items() if is_timed or name != TIME_COLUMN}
        return Table(self.nodes, columns, lambda fact: fact.is_in_table)

    def summarize(self) -> str:
        """Return how many of the nodes planned as quantized run quantized, and their share of MACs."""
        planned = sum(n.planned != FLOAT_PRECISION for n in self.nodes)
        count = planned - len(self.not_quantized)
        return (
            f"{self.target}: {count} of {planned} nodes planned as quantized run quantized, with "
            f"{self.share():.1%} of all MACs"
        )

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and the lines below it."""
        return self.table, self.summarize(), *(f"{self.target}: {each}" for each in self.speed)


def explain(
    graph: Graph,
    plan: Plan | None,
    target: Target,
    registry: Registry,
    inputs: Sequence[torch.Tensor],
    *,
    form: ExportConfiguration,
    is_timed: bool = False,
) -> Explanation:
    """Compile a graph for a target and query its runtime about each node.

    Args:
        graph: the graph of the module.
        plan: the quantization plan; None for a float model.
        target: the target that runs it.
        registry: the plugins.
        inputs: inputs of the graph; MACs are counted for their sizes.
        form: the export configuration.
        is_timed: whether to measure the time of each node, and compare that of the whole with the float model.

    Raises:
        ModelError: the form names an output that does not exist, or requires INT4 weights and there are none.
        TargetError: the target does not support a node, or its runtime is missing.
    """
    written = make_export_graph(graph, plan, target, registry, form)
    check_supported(written, target)
    with compile_temporarily(written, target) as file:
        found = explain_artifact(written, file, plan, target, inputs)
        if not is_timed or not can_time(target):
            return found
        one = take_one_sample(written, inputs)
        found = replace(found, nodes=_add_time_shares(found.nodes, target.profile(file, one)))
        if plan is None or plan.is_empty:
            return found
        with compile_temporarily(make_float_graph(graph, target, registry, form), target) as in_float:
            return replace(found, speed=compare_speed(target, file, in_float, one))


def _add_time_shares(facts: Sequence[NodeFacts], seconds: Mapping[str, float]) -> list[NodeFacts]:
    """Return facts with the share of the time that each node takes, given the seconds of nodes with an own kernel."""
    total = sum(seconds.values())
    return [
        replace(fact, time_share=seconds[fact.name] / total) if total and fact.name in seconds else fact
        for fact in facts
    ]


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
    planned = find_planned_precisions(written, scheme, plan)
    moving = scheme.data_movement if scheme else frozenset[str]()
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
    between = find_float_islands(written, {fact.name for fact in facts if fact.runs == INT8_PRECISION})
    facts = [replace(fact, is_between_int8=fact.runs == FLOAT_PRECISION and fact.name in between) for fact in facts]
    return Explanation(target.describe_runtime(), facts)


def find_float_islands(graph: Graph, in_int8: Collection[str]) -> set[str]:
    """Return the names of nodes on float that read results of INT8 nodes, and whose results INT8 nodes read.

    Args:
        graph: the graph.
        in_int8: the names of the nodes that run in INT8.
    """
    after, before = set[Value](), set[Value]()
    for node in graph.nodes:
        if node.name in in_int8 or not after.isdisjoint(_tensors(node)):
            after.update(node.outputs)
    for node in graph.nodes_backward():
        if node.name in in_int8 or not before.isdisjoint(node.outputs):
            before.update(_tensors(node))
    return {
        node.name
        for node in graph.nodes
        if not after.isdisjoint(_tensors(node))
        and not before.isdisjoint(node.outputs)
        and any(value.type.dtype.is_floating_point for value in node.outputs)
    }


def _tensors(node: Node) -> list[Value]:
    return [v for v in node.inputs if isinstance(v, Value) and not v.is_constant]


def find_planned_precisions(
    graph: Graph, scheme: QuantizationScheme | None, plan: Plan | None = None
) -> dict[Node, str]:
    """Return the planned precision of nodes that read only quantized operands (except biases), or a low-bit weight.

    An elementwise node is among them only if its result is quantized, and no operand is a number: ``x * 3`` is computed
    in float.

    Args:
        graph: quantized.
        scheme: of the target.
        plan: of the graph; the runtime may round the inputs of layers with low-bit weights.
    """
    kinds = scheme.layers | scheme.elementwise | scheme.data_movement if scheme else frozenset[str]()
    elementwise = scheme.elementwise if scheme else frozenset[str]()
    read = [n for n in graph.nodes if n.op_type in kinds and all(map(_is_dequantized, non_bias_operands(n)))]
    quantized = {
        n: INT8_PRECISION
        for n in read
        if n.op_type not in elementwise
        or (scheme and _is_requantized(n, scheme) and not any(map(_is_number, n.inputs)))
    }
    quantized |= {node: INT8_PRECISION for node in graph.nodes if node.op_type.startswith(DYNAMIC_PREFIX)}
    quantized |= {node: f"int{weight.bits} weights" for node, weight in find_low_bit_layers(graph).items()}
    rounded = plan.rounded_inputs if plan is not None else {}
    return quantized | {node: INT8_PRECISION for node in graph.nodes if node.name in rounded}


def _is_requantized(node: Node, scheme: QuantizationScheme) -> bool:
    """Return whether the result of a node is quantized, directly or after operators that the runtime fuses with it."""
    users = [use.user for use in node.output.uses if isinstance(use.user, Node)]
    return any(
        user.op_type == QDQ_OPERATORS[0]
        or (is_fused(scheme, user.op_type, user.attrs) and _is_requantized(user, scheme))
        for user in users
    )


def _is_number(operand: Any) -> bool:
    return operand is not None and not isinstance(operand, Value)


def _is_dequantized(value: Value) -> bool:
    return value.producer is not None and value.producer.op_type == QDQ_OPERATORS[1]


def _count_macs(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[Node, int]:
    """Return the MACs of each layer on the given inputs."""
    counter = MacCounter(graph, inputs)
    compute_outputs(graph, inputs, counter, counter.enter)
    return counter.of
