"""A case rebuilt call by call, with changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import operator
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder, LeafTensor
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS


@operator(error=EXACT)
def conformance_tap(x: Tensor) -> Tensor:
    """``x``: a reader that no pass knows."""
    return x.clone()


@operator(error=EXACT)
def conformance_step(x: Tensor) -> Tensor:
    """``x + 1``, or the negation of bools: a new value for the state of a call."""
    return ~x if x.dtype == torch.bool else x + 1


SUITE_OPERATORS = {op.name: op for op in (conformance_tap, conformance_step)}
"""Operators of the suite, which no plugin provides and which reproducers may contain."""


def is_safe(case: GraphCase) -> bool:
    """Return whether PyTorch rejects every illegal form of a case instead of corrupting memory."""
    return UNSAFE_OPERATORS.isdisjoint(node.op_type for node in case.graph.nodes)


@dataclass
class CaseRebuilder:
    """Rebuilds a case call by call, with changes."""

    case: GraphCase
    builder: EagerGraphBuilder
    mapping: dict[Value, Any]

    @classmethod
    def of(cls, case: GraphCase) -> CaseRebuilder:
        """Start from an empty graph."""
        return cls(case, EagerGraphBuilder(), {})

    @classmethod
    def with_leaves(
        cls, case: GraphCase, change: Callable[[Value, LeafTensor], LeafTensor] = lambda _, leaf: leaf
    ) -> CaseRebuilder:
        """Start from the leaves of a case, after applying ``change``."""
        new = cls.of(case)
        new.add_leaves(change)
        return new

    @classmethod
    def rebuild(
        cls, case: GraphCase, change: Callable[[Value, LeafTensor], LeafTensor] = lambda _, leaf: leaf
    ) -> CaseRebuilder | None:
        """Rebuild a whole case after applying ``change`` to its leaves; None if a call becomes illegal."""
        new = cls.with_leaves(case, change)
        return new if new.add_nodes() else None

    @property
    def leaves(self) -> list[tuple[Value, Tensor]]:
        """The inputs and constants of the case, with their tensors."""
        graph = self.case.graph
        constants = [v for v in graph.constants.values() if v.data is not None]
        return [(v, self.case.tensors[v]) for v in (*graph.inputs, *constants)]

    def add_leaves(self, change: Callable[[Value, LeafTensor], LeafTensor] = lambda _, leaf: leaf) -> None:
        """Add every leaf, after applying ``change``."""
        for value, tensor in self.leaves:
            leaf = change(value, LeafTensor(tensor, value.is_constant, name=value.name))
            self.mapping[value] = self.builder.leaf(leaf)

    def take(self, node: Node, inputs: Sequence[Any] | None = None, attrs: Mapping[str, Any] | None = None) -> bool:
        """Add a node, with other operands or attributes if given; return whether that is legal.

        A node with bodies is added as it is: its bodies have the types of these operands.
        """
        operands = [self.map_operand(v) for v in (node.inputs if inputs is None else inputs)]
        attrs = node.attrs if attrs is None else attrs
        if inputs is None and attrs is node.attrs and self._is_known(node):
            new = self.builder.add_copy(node, self.mapping, [self.case.tensors[v] for v in node.outputs])
        elif node.bodies:
            return False
        else:
            new = self.builder.add_call(node.op, operands, attrs)
        if new is None or len(new.outputs) != len(node.outputs):
            return False
        self.mapping.update(zip(node.outputs, new.outputs, strict=True))
        return True

    def _is_known(self, node: Node) -> bool:
        """Return whether a node has the same operands as in the case, so that its results are known."""
        known, twins = self.case.tensors, [(v, self.mapping.get(v)) for v in node.inputs if isinstance(v, Value)]
        return known.keys() >= {*node.outputs} and all(
            isinstance(twin, Value) and twin.type == v.type and self.builder.tensors[twin] is known[v]
            for v, twin in twins
        )

    def add_nodes(self) -> bool:
        """Add every node unchanged; return whether that is legal."""
        return all(self.take(node) for node in self.case.graph.nodes)

    def map_operand(self, item: Any) -> Any:
        """Return the new value for an operand of the case."""
        return self.mapping.get(item, item) if isinstance(item, Value) else item

    @property
    def unread(self) -> list[Value]:
        """Results that had readers in the case and have none now, so that faults in them would not show."""
        returned = {self.map_operand(v) for v in self.case.graph.outputs}
        read = [self.map_operand(v) for node in self.case.graph.nodes for v in node.outputs if v.uses]
        return [v for v in read if not v.uses and v not in returned]

    def finish(self, name: str, extra: Sequence[Value] = (), *, first: bool = False, tapped: bool = True) -> GraphCase:
        """Return the case, with extra outputs before or after its own.

        With ``tapped``, a node reads each output, and its result is returned instead. A pass may not replace an output
        by an input or another output, so without the tap a wrong replacement would not show.
        """
        own = [self.map_operand(v) for v in self.case.graph.outputs]
        outputs = [*extra, *own] if first else [*own, *extra]
        return self.builder.finish(name, [self._tap(v) for v in outputs] if tapped else outputs)

    def _tap(self, value: Value) -> Value:
        tap = Node(conformance_tap, [value], {})
        return self.builder.add(tap, [value.type], [self.builder.tensors[value].clone()]).output
