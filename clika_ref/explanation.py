"""What a runtime really does with a module: each node, what was planned for it, and what it runs in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Artifact, Target
from clika_ref.emulation import place_of
from clika_ref.exporting.configuration import ExportConfiguration
from clika_ref.exporting.export import as_written, refuse
from clika_ref.exporting.rounded_inputs import compressed_layers
from clika_ref.precisions import FLOAT, FUSED, INTEGERS
from clika_ref.quantization.layer_weights import operands_but_bias
from clika_ref.quantization.products import ProductCounter
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization_scheme import QuantizationScheme, scheme_of
from clika_ref.reporting.tables import Table, Told

UNNAMED = "not named by the runtime"
"""Of a node of which the runtime says nothing, and of what computes integers where it names no kernel for that."""

PAIR = ("quantize", "dequantize")
"""The operators at the borders of integers."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of the graph as it is written."""

    name: str
    """Of the node in the graph as it is written."""
    scope: str
    """The path of its module."""
    operator: str
    """The name of its operator."""
    products: int
    """How many numbers it multiplies and adds up on the example; 0 for what is no layer. For a transposed convolution
    it counts the zeros between its inputs as well."""
    planned: str
    """``int8``, ``int4 weights`` or ``int8 weights``, or ``float``."""
    runs: str
    """What the runtime runs it in, said alike; ``fused`` where it is a part of another node, or `UNNAMED`."""
    reason: str
    """Why it runs in float, where the plan or the runtime tells."""

    @property
    def is_told(self) -> bool:
        """Whether tables show it: a layer, another one that was planned in integers, or one between integers."""
        return bool(self.products or self.reason) or self.planned != FLOAT


COLUMNS: Mapping[str, Callable[[NodeFacts], object]] = {
    "layer": lambda fact: fact.scope or fact.name,
    "operator": lambda fact: fact.operator,
    "products": lambda fact: fact.products or None,
    "planned": lambda fact: fact.planned,
    "runs in": lambda fact: fact.runs,
    "why": lambda fact: fact.reason,
}


@dataclass(frozen=True, repr=False)
class Explanation(Told):
    """What became of each node in a target; printed, a table of layers and of what else was planned in integers."""

    target: str
    nodes: Sequence[NodeFacts]
    """The facts of each, in order."""

    def share(self, *, planned: bool = False) -> float:
        """Return which share of the products of all layers runs in integers, or was planned to."""
        whole = sum(n.products for n in self.nodes)
        floats = (FLOAT, FUSED, UNNAMED)
        found = sum(n.products for n in self.nodes if (n.planned if planned else n.runs) not in floats)
        return found / whole if whole else 0.0

    @property
    def missed(self) -> Sequence[NodeFacts]:
        """Those that were planned in integers and run in float, or of which the runtime names nothing."""
        return [n for n in self.nodes if n.planned != FLOAT and n.runs in (FLOAT, UNNAMED)]

    @property
    def table(self) -> Table[NodeFacts]:
        """All nodes, of which layers and those planned in integers are printed."""
        return Table(self.nodes, COLUMNS, lambda fact: fact.is_told)

    def in_one_line(self) -> str:
        """Return how many nodes run in integers of those that were planned to, and how much that is."""
        planned = sum(n.planned != FLOAT for n in self.nodes)
        return (
            f"{self.target}: {planned - len(self.missed)} of {planned} nodes that were planned in integers run in "
            f"integers, with {self.share():.1%} of the products of all layers"
        )

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line below it."""
        return self.table, self.in_one_line()


def explain(
    graph: Graph,
    plan: Plan | None,
    target: Target,
    registry: Registry,
    inputs: Sequence[torch.Tensor],
    *,
    form: ExportConfiguration,
) -> Explanation:
    """Write a graph for a target, and ask its runtime what it makes of it.

    Args:
        graph: of the module.
        plan: what becomes integers; nothing where None.
        target: which runs it.
        registry: the plugins.
        inputs: of the graph, whose sizes products are counted for.
        form: in which it is written.

    Raises:
        ModelError: the form names an output that there is not, or wants four bits where there are none.
        TargetError: the target refuses a node, or its runtime is missing.
    """
    written = as_written(graph, plan, target, registry, form)
    refuse(written, target)
    with compiled(written, target) as file:
        return explained(written, file, plan, target, inputs)


@contextmanager
def compiled(written: Graph, target: Target) -> Iterator[Artifact]:
    """Write a graph into a file that is gone afterwards, of which everything can be asked that there is to ask.

    Args:
        written: the graph as its target gets it.
        target: which runs it.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield target.compile(written, Path(folder) / "model.onnx")


def explained(
    written: Graph, file: Artifact, plan: Plan | None, target: Target, inputs: Sequence[torch.Tensor]
) -> Explanation:
    """Ask the runtime of a target what it makes of a file.

    Args:
        written: the graph that the file was written of.
        file: the artifact.
        plan: what became integers; nothing where None.
        target: which wrote it.
        inputs: of the graph, whose sizes products are counted for.

    Raises:
        TargetError: the runtime is missing, or rejects the file.
    """
    runs = target.explain(file)
    products, scheme = _products(written, inputs), scheme_of(target)
    planned, moving = planned_precisions(written, scheme), scheme.moving if scheme else frozenset[str]()
    facts: list[NodeFacts] = []
    for node in written.nodes:
        if node.kind not in PAIR:
            precision, _, reason = runs.get(node.name, UNNAMED).partition(": ")
            wanted = planned.get(node, FLOAT)
            if precision == FUSED and wanted != FLOAT and node.kind not in moving:
                precision = UNNAMED  # a runtime may leave out what only moves integers
            if plan is not None and wanted == FLOAT:
                reason = plan.floats.get(node.name, reason)
            origin, count = node.origin.scope, products.get(node, 0)
            facts.append(NodeFacts(node.name, origin, node.kind, count, wanted, precision, reason))
    return Explanation(place_of(target), facts)


def planned_precisions(graph: Graph, scheme: QuantizationScheme | None) -> dict[Node, str]:
    """Return what nodes are planned in: those that read nothing but integers, biases aside, or a weight in few bits.

    Elementwise ones read no number beside them either: ``x * 3`` is computed in float.
    """
    kinds = scheme.layers | scheme.elementwise | scheme.moving if scheme else frozenset[str]()
    elementwise = scheme.elementwise if scheme else frozenset[str]()
    read = [n for n in graph.nodes if n.kind in kinds and all(map(_is_dequantized, operands_but_bias(n)))]
    whole = {n: INTEGERS for n in read if n.kind not in elementwise or not any(map(_is_number, n.inputs))}
    return whole | {node: f"int{held.bits} weights" for node, held in compressed_layers(graph).items()}


def _is_number(operand: Any) -> bool:
    return operand is not None and not isinstance(operand, Value)


def _is_dequantized(value: Value) -> bool:
    return value.producer is not None and value.producer.kind == PAIR[1]


def _products(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[Node, int]:
    """Return how many products each layer adds up on some inputs."""
    counter = ProductCounter(graph, inputs)
    with torch.no_grad():
        interpret(graph, inputs, counter)
    return counter.of
