"""The parts of a loop's body, in order of their dependences: computed at once, a recurrent layer, or a loop."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from clika_ref.core.ir import Node, Use, Value
from clika_ref_cleanup.linear_recurrences import is_linear_step
from clika_ref_cleanup.vectorize import is_vectorizable

CELLS: Mapping[str, str] = {
    "lstm_cell": "lstm",
    "gru_cell": "gru",
    "rnn_tanh_cell": "rnn_tanh",
    "rnn_relu_cell": "rnn_relu",
}
"""The recurrent layer of each cell."""


class PartKind(enum.Enum):
    """How to compute a part."""

    VECTOR = "for all iterations at once"
    CELL = "recurrent layer"
    LINEAR = "linear recurrence"
    SCAN = "loop"


@dataclass(frozen=True)
class LoopPart:
    """Nodes of a body, in order, and the positions of the states that they carry."""

    kind: PartKind
    nodes: Sequence[Node]
    states: Sequence[int] = ()


class LoopStructure:
    """The parts of the body of a ``scan`` node; each reads states and results of earlier parts only."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.body = node.bodies[0]
        self.carried: int = node.attrs["carried"]
        self.scanned: int = node.attrs["scanned"]
        self.states = {value: i for i, value in enumerate(self.body.inputs[: self.carried])}
        self._varying = set(self.body.inputs[: self.carried + self.scanned])
        self._sources = self._find_sources()
        self.parts = self._merge_loops([self._classify(nodes) for nodes in self._list_components()])

    @property
    def is_divisible(self) -> bool:
        """Whether any part needs no loop."""
        return any(part.kind is not PartKind.SCAN for part in self.parts)

    def list_read_outside(self, part: LoopPart) -> set[Value]:
        """Return the results of a part that other parts or the body's outputs read, other than by a state."""
        own = set(part.nodes)
        values = [v for node in part.nodes for v in node.outputs]
        return {v for v in values if any(use.user not in own for use in v.uses)}

    def _list_producers(self, node: Node) -> Iterator[Node]:
        """Yield the nodes that a node depends on, also through states."""
        for value in node.inputs:
            if isinstance(value, Value) and not value.is_constant:
                source = self.body.outputs[self.states[value]] if value in self.states else value
                if source.producer is not None:
                    yield source.producer

    def _find_sources(self) -> dict[Node, set[Node]]:
        """Return all nodes that each node depends on, directly or not; a node of a cycle depends on itself."""
        found: dict[Node, set[Node]] = {}
        for node in self.body.nodes:
            found[node], stack = set(), list(self._list_producers(node))
            while stack:
                current = stack.pop()
                if current not in found[node]:
                    found[node].add(current)
                    stack.extend(self._list_producers(current))
        return found

    def _list_components(self) -> list[list[Node]]:
        """Return the strongly connected components of the body, each after those that it depends on."""
        components: dict[Node, list[Node]] = {}
        for node, sources in self._sources.items():
            first = next((n for n in components if n in sources and node in self._sources[n]), node)
            components.setdefault(first, []).append(node)
        return sorted(components.values(), key=lambda nodes: len(self._sources[nodes[0]] | {*nodes}))

    def _merge_loops(self, parts: Sequence[LoopPart]) -> list[LoopPart]:
        """Merge all loops, and the parts between them, to one, as two loops take longer."""
        looped = {node for part in parts if part.kind is PartKind.SCAN for node in part.nodes}
        if not looped:
            return list(parts)
        before = set[Node]().union(*(self._sources[node] for node in looped))
        inner = [
            part
            for part in parts
            if part.kind is PartKind.SCAN or (part.nodes[0] in before and looped & self._sources[part.nodes[0]])
        ]
        own = {node for part in inner for node in part.nodes}
        states = sorted(i for part in inner for i in part.states)
        whole = LoopPart(PartKind.SCAN, [node for node in self.body.nodes if node in own], states)
        kept = [part for part in parts if part not in inner]
        earlier = [part for part in kept if not own & self._sources[part.nodes[0]]]
        return [*earlier, whole, *(part for part in kept if part not in earlier)]

    def _classify(self, nodes: Sequence[Node]) -> LoopPart:
        own = set(nodes)
        states = [
            i for value, i in self.states.items() if self.body.outputs[i].producer in own and _is_read(value, own)
        ]
        first = nodes[0]
        varies = [isinstance(v, Value) and v in self._varying for v in first.inputs]
        self._varying.update(v for node in nodes if states or any(varies) for v in node.outputs)
        if not states:
            is_invariant = not any(varies) and not first.bodies and not first.is_random
            kind = (
                PartKind.VECTOR if is_invariant or (any(varies) and is_vectorizable(first, varies)) else PartKind.SCAN
            )
            if kind is PartKind.SCAN:
                self._varying.update(first.outputs)
            return LoopPart(kind, nodes)
        if self._is_layer(nodes):
            return LoopPart(PartKind.CELL, nodes, states)
        if len(states) == 1 and self._is_linear(nodes, states[0]):
            return LoopPart(PartKind.LINEAR, nodes, states)
        return LoopPart(PartKind.SCAN, nodes, states)

    def _is_linear(self, nodes: Sequence[Node], state: int) -> bool:
        before, after = self.body.inputs[state], self.body.outputs[state]
        return before.type == after.type and is_linear_step(nodes, before)

    def _is_layer(self, nodes: Sequence[Node]) -> bool:
        """Whether the part is one cell that a recurrent layer computes for all iterations."""
        cell = nodes[0]
        if len(nodes) > 1 or cell.op_type not in CELLS:
            return False
        x, *rest = cell.inputs
        count = len(cell.outputs)
        held, parameters = rest[:count], rest[count:]
        if [self.states.get(v) for v in held] != [self._find_state(v) for v in cell.outputs] or x in held:
            return False
        biases = parameters[2:]
        if (biases[0] is None) != (biases[1] is None) or any(p in self._varying for p in parameters):
            return False
        same_types = all(a.type == b.type for a, b in zip(held, cell.outputs, strict=True))
        return same_types and all(self._is_only_carried(cell, i) for i in range(1, count))

    def _find_state(self, value: Value) -> int | None:
        return next((i for i in range(self.carried) if self.body.outputs[i] is value), None)

    def _is_only_carried(self, cell: Node, index: int) -> bool:
        """Whether only the cell itself reads one of its states, since a layer returns the last one only."""
        value, state = cell.outputs[index], cell.inputs[1 + index]
        return value.uses == (Use(self.body, self.states[state]),) and {use.user for use in state.uses} == {cell}


def _is_read(value: Value, nodes: Collection[Node]) -> bool:
    return any(use.user in nodes for use in value.uses)
