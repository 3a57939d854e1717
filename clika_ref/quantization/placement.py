"""Placement: which values of a graph are quantized, from the traits of operators and the scheme of a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization.calibration import moves_what_was_seen
from clika_ref.quantization.layer_weights import groups_of, is_own, position_of
from clika_ref.quantization_scheme import QuantizationScheme, Sums, absorbs

COMPUTE = "compute"
"""Trait kind of operators that multiply and accumulate, where INT8 saves time."""

FLOAT_LAYER = "float-layer"
"""Trait kind of such operators that compute in float on every target."""


@dataclass
class Placement:
    """Which values and nodes of a graph are quantized."""

    scaled_as: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Each quantized value, with the value that its scale comes from: itself, or the source that it was moved from."""
    joined_with: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    """Further values that share the scale of a value; its range need not contain theirs."""
    layers: dict[Node, Value] = field(default_factory=dict[Node, Value])
    """Quantized nodes with weights, each with its output after fusion with the operators that the runtime absorbs."""
    elementwise: dict[Node, Value] = field(default_factory=dict[Node, Value])
    """Other quantized nodes, with their outputs after fusion."""
    floats: dict[Node, str] = field(default_factory=dict[Node, str])
    """Nodes that multiply and accumulate, but stay in float, with the reason."""


IN_FLOAT = "the target computes {} in float"

SUM = "add"
"""The operator that `Sums` describes."""


def place(
    graph: Graph,
    scheme: QuantizationScheme,
    has_range: Callable[[Value], bool],
    skipped: Mapping[Node, str],
    *,
    is_negative: Callable[[Value], bool] = lambda _: True,
) -> Placement:
    """Choose the nodes and values to quantize.

    Args:
        graph: lowered.
        scheme: quantization scheme of the target.
        has_range: whether calibration found bounded elements of a value; masks have none.
        skipped: nodes that stay in float, with the reason.
        is_negative: whether a value had, or may have, a negative element.
    """
    return _Placing(graph, scheme, has_range, skipped, is_negative).run()


class _Placing:
    def __init__(
        self,
        graph: Graph,
        scheme: QuantizationScheme,
        has_range: Callable[[Value], bool],
        skipped: Mapping[Node, str],
        is_negative: Callable[[Value], bool],
    ) -> None:
        self.graph, self.scheme, self.has_range, self.skipped = graph, scheme, has_range, skipped
        self.is_negative = is_negative
        self.found = Placement()
        self.moved: dict[Value, Value] = {}
        """Values that only move quantized data and need no quantization, with the source of their scale."""
        self.order = {node: number for number, node in enumerate(graph.nodes)}

    def run(self) -> Placement:
        for node in self.graph.nodes:
            if node.op.trait.matrices is not None:
                self.found.floats[node] = self.skipped.get(node, IN_FLOAT.format(node.kind))
            elif node.op.trait.kind == COMPUTE:
                reason = self._refusal(node)
                if reason:
                    self.found.floats[node] = reason
                else:
                    self.found.layers[node] = self._tail(node)
        wanted = {_operand(node) for node in self.found.layers}
        wanted |= {tail for node, tail in self.found.layers.items() if node.kind in self.scheme.closed}
        wanted |= {self._before_moves(value) for value in wanted if self.scheme.moves_integers}
        for value in self.graph.inputs:
            if value in wanted:
                self.found.scaled_as[value] = value
        for node in self.graph.nodes:
            self._visit(node, wanted)
        return self.found

    def _refusal(self, node: Node) -> str:
        """Return the reason to keep a compute node in float, empty if there is none."""
        if node in self.skipped:
            return self.skipped[node]
        if node.kind not in self.scheme.layers:
            return IN_FLOAT.format(node.kind)
        weight = node.inputs[position_of(node)]
        if not is_own(self.graph, weight):
            return "both operands are computed"
        if weight.type.dtype != torch.float32:
            return f"its weight is {weight.type.dtype}, and only float32 is quantized: compile model.float()"
        if not self.has_range(_moved_from(_operand(node))):
            return "its input has no range: it is a mask, or calibration saw no element"
        if node.kind in self.scheme.closed and not self.has_range(_moved_from(self._tail(node))):
            return "its result has no range"
        if node.kind in self.scheme.undivided and groups_of(node) > 1:
            return f"the target computes {node.kind} of several groups in float"
        if node.kind in self.scheme.from_zero and self.is_negative(_moved_from(_operand(node))):
            return f"the target computes {node.kind} in integers only where nothing that it reads lies below 0"
        return ""

    def _tail(self, node: Node) -> Value:
        """Return the output of a node after fusion with the operators that the runtime absorbs."""
        value = node.output
        while node.kind in self.scheme.closed | self.scheme.elementwise and len(value.uses) == 1:
            (use,) = value.uses
            user = use.user
            if not isinstance(user, Node) or use.position != 0 or not absorbs(self.scheme, user.kind, user.attrs):
                break
            value = user.output
        return value

    def _before_moves(self, value: Value) -> Value:
        """Return the source that a value was moved from, up to the last value with other readers.

        The nodes in between then move quantized data.
        """
        while value.producer is not None and value.producer.kind in self.scheme.moving:
            source = _operand(value.producer)
            if len(source.uses) > 1:
                break
            value = source
        return value

    def _visit(self, node: Node, wanted: set[Value]) -> None:
        """Decide on the results of a node, after its inputs."""
        found = self.found.scaled_as
        if node.kind in self.scheme.elementwise and self._is_all_integers(node):
            for value in _tensors(node):
                self._keep(value)
            self.found.elementwise[node] = self._tail(node)
            wanted.add(self._tail(node))
        source = self._held(_operand(node)) if node.kind in self.scheme.moving else None
        if node.kind == SUM and self.scheme.sums is not None:
            self._add(node, self.scheme.sums)
        for value in node.outputs:
            if source is not None and value.index == 0:
                self.moved[value] = source
            if value in wanted:
                self._want(value)
        if node.kind in self.scheme.joined and node.output in found:
            self._join(node)

    def _want(self, value: Value) -> None:
        """Quantize a value, with the scale of the source that it was moved from, or its own."""
        self._keep(value)
        self.found.scaled_as.setdefault(value, _moved_from(value))

    def _add(self, node: Node, sums: Sums) -> None:
        """Quantize the values added to the result of a layer: the runtime fuses the addition with the latest layer."""
        operands = [*_tensors(node)]
        results = {v: self.order[v.producer] for v in operands if v.producer is not None and self._is_result(v, sums)}
        if not results or len(operands) != 2 or operands[0].type.shape != operands[1].type.shape:
            return
        latest = max(results, key=lambda v: results[v])
        rounded = [v for v in operands if sums.of_two_rounded or v is not latest]
        if all(self.has_range(_moved_from(v)) for v in rounded):
            for value in rounded:
                self._want(value)

    def _is_result(self, value: Value, sums: Sums) -> bool:
        """Return whether a value is the result of a quantized layer that fuses additions, with no other reader."""
        node = value.producer
        return node in self.found.layers and node.kind in sums.layers and len(value.uses) == 1

    def _join(self, node: Node) -> None:
        """Give all operands the scale of the joined result, also those of earlier joins.

        Constants are skipped: several nodes may read them, and each quantizes them separately.
        """
        whole = self.found.scaled_as[node.output]
        for value in _tensors(node):
            if value.is_constant:
                continue
            own = self.found.scaled_as.setdefault(value, whole)
            if own is not whole:
                self._merge(own, whole, is_part=own is value)
            if value.producer is not None and value.producer.kind in self.scheme.joined:
                self._join(value.producer)

    def _merge(self, own: Value, whole: Value, *, is_part: bool) -> None:
        """Replace the scale ``own`` by that of ``whole``; it must also cover ``own`` unless that is a part of it."""
        for other, source in self.found.scaled_as.items():
            if source is own:
                self.found.scaled_as[other] = whole
        beside = [*self.found.joined_with.pop(own, []), *([] if is_part else [own])]
        if beside:
            self.found.joined_with.setdefault(whole, []).extend(beside)

    def _is_all_integers(self, node: Node) -> bool:
        """Return whether all inputs of a node are quantized already, and its result can be."""
        if node in self.skipped or not self.has_range(self._tail(node)):
            return False
        tensors = [*_tensors(node)]
        others = any(not isinstance(v, Value) for v in node.inputs if v is not None)
        return not others and bool(tensors) and all(self._held(v) is not None for v in tensors)

    def _held(self, value: Value) -> Value | None:
        """Return the value that the scale of a quantized value comes from, None if it is not quantized."""
        return self.found.scaled_as.get(value) or self.moved.get(value)

    def _keep(self, value: Value) -> None:
        """Quantize a value that was moved from a quantized one, and all values in between."""
        while value in self.moved and value not in self.found.scaled_as:
            self.found.scaled_as[value] = self.moved[value]
            assert value.producer is not None
            value = _operand(value.producer)


def _operand(node: Node) -> Value:
    """Return the first tensor operand: the data input of a compute or move operator."""
    return next(v for v in node.inputs if isinstance(v, Value))


def _tensors(node: Node) -> Iterator[Value]:
    return (v for v in node.inputs if isinstance(v, Value))


def _moved_from(value: Value) -> Value:
    """Return the value that calibration observed: the source that a value was moved from."""
    while value.producer is not None and moves_what_was_seen(value.producer):
        value = _operand(value.producer)
    return value
