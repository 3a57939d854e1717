"""Placement: which values of a graph are quantized, from the traits of operators and the scheme of a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import FusedSums, QuantizationScheme, is_fused
from clika_ref.quantization.calibration.calibrator import source_of_moves
from clika_ref.quantization.qdq.layer_weights import groups_of, is_unchanged_constant, weight_position_of

COMPUTE_TRAIT = "compute"
"""Trait of operators that multiply and accumulate, where INT8 saves time."""

FLOAT_LAYER_TRAIT = "float-layer"
"""Trait kind of such operators that compute in float on every target."""


@dataclass
class Placement:
    """Which values and nodes of a graph are quantized."""

    scale_sources: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Each quantized value, with the value that its scale comes from: itself, or the source that it was moved from."""
    scale_sharers: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    """Further values that share the scale of a value; its range need not contain theirs."""
    layers: dict[Node, Value] = field(default_factory=dict[Node, Value])
    """Quantized nodes with weights, each with its output after fusion with the operators that the runtime absorbs."""
    elementwise: dict[Node, Value] = field(default_factory=dict[Node, Value])
    """Other quantized nodes, with their outputs after fusion."""
    floats: dict[Node, str] = field(default_factory=dict[Node, str])
    """Nodes that multiply and accumulate, but stay in float, with the reason."""


FLOAT_ONLY_REASON = "the target computes {} in float"

SUM_OPERATOR = "add"
"""The operator that `FusedSums` describes."""


def choose_placement(
    graph: Graph,
    scheme: QuantizationScheme,
    has_range: Callable[[Value], bool],
    skipped: Mapping[Node, str],
    *,
    is_negative: Callable[[Value], bool] = lambda _: True,
    find_constant: Callable[[Value], float | None] = lambda _: None,
) -> Placement:
    """Choose the nodes and values to quantize.

    Args:
        graph: lowered.
        scheme: quantization scheme of the target.
        has_range: whether calibration found bounded elements of a value; masks have none.
        skipped: nodes that stay in float, with the reason.
        is_negative: whether a value had, or may have, a negative element.
        find_constant: the one number that all elements of a value were in calibration, None if they differed.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    finder = _PlacementFinder(graph, scheme, has_range, skipped, is_negative, find_constant, order)
    found = finder.run()
    unread = find_unread_elementwise(graph, scheme, found)
    return replace(finder, skipped={**skipped, **unread}, found=Placement(), move_sources={}).run() if unread else found


def find_unread_elementwise(graph: Graph, scheme: QuantizationScheme, found: Placement) -> dict[Node, str]:
    """Return the quantized elementwise nodes whose results no quantized node reads, directly or after moves.

    Quantizing them would only add rounding errors.

    Args:
        graph: lowered.
        scheme: quantization scheme of the target.
        found: the placement that contains these nodes.
    """
    read = {node.first_tensor for node in found.layers}
    unread: dict[Node, str] = {}
    for node in graph.nodes_backward():
        if node in found.elementwise and found.elementwise[node] not in read:
            unread[node] = "no quantized node reads its result"
        elif node in found.elementwise or (node.op_type in scheme.data_movement and not read.isdisjoint(node.outputs)):
            read.update(_tensor_operands(node))
    return unread


@dataclass
class _PlacementFinder:
    graph: Graph
    scheme: QuantizationScheme
    has_range: Callable[[Value], bool]
    skipped: Mapping[Node, str]
    is_negative: Callable[[Value], bool]
    find_constant: Callable[[Value], float | None]
    order: Mapping[Any, int]
    """Position of each node in the graph."""
    found: Placement = field(default_factory=Placement)
    move_sources: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Values that only move quantized data and need no quantization, with the source of their scale."""

    def run(self) -> Placement:
        for node in self.graph.nodes:
            if node.op.trait.matrices is not None:
                self.found.floats[node] = self.skipped.get(node, FLOAT_ONLY_REASON.format(node.op_type))
            elif node.op.trait.kind == COMPUTE_TRAIT:
                reason = self._find_float_reason(node)
                if reason:
                    self.found.floats[node] = reason
                else:
                    self.found.layers[node] = self._find_fused_output(node)
        required = {node.first_tensor for node in self.found.layers}
        required |= {
            tail for node, tail in self.found.layers.items() if node.op_type in self.scheme.needs_quantized_output
        }
        required |= {self._source_before_moves(value) for value in required if self.scheme.quantizes_before_moves}
        for value in self.graph.inputs:
            if value in required:
                self.found.scale_sources[value] = value
        for node in self.graph.nodes:
            self._visit(node, required)
        return self.found

    def _find_float_reason(self, node: Node) -> str:
        """Return the reason to keep a compute node in float, empty if there is none."""
        if node in self.skipped:
            return self.skipped[node]
        if node.op_type not in self.scheme.layers:
            return FLOAT_ONLY_REASON.format(node.op_type)
        weight = node.inputs[weight_position_of(node)]
        if not is_unchanged_constant(self.graph, weight):
            return "both operands are computed"
        if weight.type.dtype != torch.float32:
            return f"its weight is {weight.type.dtype}, and only float32 is quantized: compile model.float()"
        if not self.has_range(source_of_moves(node.first_tensor)):
            return "its input has no range: it is a mask, or was empty in calibration"
        constant = self.find_constant(source_of_moves(node.first_tensor))
        if constant is not None:
            return f"its input was {constant:g} in all calibration data: its range is unknown"
        if node.op_type in self.scheme.needs_quantized_output and not self.has_range(
            source_of_moves(self._find_fused_output(node))
        ):
            return "its output has no range"
        if node.op_type in self.scheme.needs_single_group and groups_of(node) > 1:
            return f"the target computes {node.op_type} with groups in float"
        if node.op_type in self.scheme.needs_zero_point_0 and self.is_negative(source_of_moves(node.first_tensor)):
            return f"the target runs {node.op_type} in INT8 only if its inputs are not negative"
        return ""

    def _find_fused_output(self, node: Node) -> Value:
        """Return the output of a node after fusion with the operators that the runtime absorbs."""
        value = node.output
        while node.op_type in self.scheme.needs_quantized_output | self.scheme.elementwise and len(value.uses) == 1:
            (use,) = value.uses
            user = use.user
            if not isinstance(user, Node) or use.position != 0 or not is_fused(self.scheme, user.op_type, user.attrs):
                break
            value = user.output
        return value

    def _source_before_moves(self, value: Value) -> Value:
        """Return the source that a value was moved from, up to the last value with other readers.

        The nodes in between then move quantized data.
        """
        while value.producer is not None and value.producer.op_type in self.scheme.data_movement:
            source = value.producer.first_tensor
            if len(source.uses) > 1:
                break
            value = source
        return value

    def _visit(self, node: Node, required: set[Value]) -> None:
        """Decide on the results of a node, after its inputs."""
        found = self.found.scale_sources
        if node.op_type in self.scheme.elementwise and self._is_fully_quantized(node):
            for value in _tensor_operands(node):
                self._share_source_scale(value)
            self.found.elementwise[node] = self._find_fused_output(node)
            required.add(self._find_fused_output(node))
        source = self._scale_source(node.first_tensor) if node.op_type in self.scheme.data_movement else None
        if node.op_type == SUM_OPERATOR and self.scheme.fused_sums is not None:
            self._quantize_addends(node, self.scheme.fused_sums)
        for value in node.outputs:
            if source is not None and value.index == 0:
                self.move_sources[value] = source
            if value in required:
                self._quantize_value(value)
        if node.op_type in self.scheme.shared_qparams and node.output in found:
            self._join_scales(node)

    def _quantize_value(self, value: Value) -> None:
        """Quantize a value, with the scale of the source that it was moved from, or its own."""
        self._share_source_scale(value)
        self.found.scale_sources.setdefault(value, source_of_moves(value))

    def _quantize_addends(self, node: Node, sums: FusedSums) -> None:
        """Quantize the values added to the result of a layer: the runtime fuses the addition with the latest layer."""
        operands = [*_tensor_operands(node)]
        results = [v for v in operands if self._is_fusible_result(v, sums)]
        if not results or len(operands) != 2 or operands[0].type.shape != operands[1].type.shape:
            return
        latest = max(results, key=lambda v: self.order[v.producer])
        rounded = [v for v in operands if sums.rounds_layer_result or v is not latest]
        if all(self.has_range(source_of_moves(v)) for v in rounded):
            for value in rounded:
                self._quantize_value(value)

    def _is_fusible_result(self, value: Value, sums: FusedSums) -> bool:
        """Return whether a value is the result of a quantized layer that fuses additions, with no other reader."""
        node = value.producer
        return node in self.found.layers and node.op_type in sums.layers and len(value.uses) == 1

    def _join_scales(self, node: Node) -> None:
        """Give all operands the scale of the joined result, also those of earlier joins.

        Constants are skipped: several nodes may read them, and each quantizes them separately.
        """
        whole = self.found.scale_sources[node.output]
        for value in _tensor_operands(node):
            if value.is_constant:
                continue
            own = self.found.scale_sources.setdefault(value, whole)
            if own is not whole:
                self._merge_scales(own, whole, is_part=own is value)
            if value.producer is not None and value.producer.op_type in self.scheme.shared_qparams:
                self._join_scales(value.producer)

    def _merge_scales(self, own: Value, whole: Value, *, is_part: bool) -> None:
        """Replace the scale ``own`` by that of ``whole``; it must also cover ``own`` unless that is a part of it."""
        for other, source in self.found.scale_sources.items():
            if source is own:
                self.found.scale_sources[other] = whole
        sharers = [*self.found.scale_sharers.pop(own, []), *([] if is_part else [own])]
        if sharers:
            self.found.scale_sharers.setdefault(whole, []).extend(sharers)

    def _is_fully_quantized(self, node: Node) -> bool:
        """Return whether all inputs of a node are quantized already, and its result can be."""
        if node in self.skipped or not self.has_range(self._find_fused_output(node)):
            return False
        tensors = [*_tensor_operands(node)]
        others = any(not isinstance(v, Value) for v in node.inputs if v is not None)
        return not others and bool(tensors) and all(self._scale_source(v) is not None for v in tensors)

    def _scale_source(self, value: Value) -> Value | None:
        """Return the value that the scale of a quantized value comes from, None if it is not quantized."""
        return self.found.scale_sources.get(value) or self.move_sources.get(value)

    def _share_source_scale(self, value: Value) -> None:
        """Give a value the scale of the quantized one that its elements come from, and all values in between."""
        while value in self.move_sources and value not in self.found.scale_sources:
            self.found.scale_sources[value] = self.move_sources[value]
            assert value.producer is not None
            value = value.producer.first_tensor


def _tensor_operands(node: Node) -> Iterator[Value]:
    return (v for v in node.inputs if isinstance(v, Value))
