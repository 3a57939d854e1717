"""Channel factors: divide a value by them, and multiply the weights that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.deferred_constants import DeferredConstant, make_source_constant
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.quantization.qdq.layer_weights import (
    data_of,
    groups_of,
    is_unchanged_constant,
    reshape_along_dim,
    weight_of,
    weight_position_of,
)
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT


@dataclass(frozen=True)
class ScalableChannels:
    """A value with channels that can be divided, since all of these readers multiply it with weights."""

    value: Value
    axis: int
    """Dim of the channels."""
    readers: tuple[Use, ...]
    """The uses by layers."""
    source: Node | None
    """Node with constants that absorb the division; None if a separate node must divide."""

    @property
    def layers(self) -> list[Node]:
        """The layers that multiply the value with weights."""
        return [_user_node(use) for use in self.readers]

    @property
    def has_only_matrices(self) -> bool:
        """Whether all of them multiply rows with a matrix."""
        return self.axis == -1 and all(weight.ndim == 2 for _, weight in self.layer_weights())

    def layer_weights(self) -> list[tuple[Node, Tensor]]:
        """Return the layers with their weights, each ``float32[outputs, inputs / groups, ...]``."""
        return [(node, data_of(weight_of(node))) for node in self.layers]

    def rows(self, x: Tensor) -> Tensor:
        """Return a tensor of the value as ``[rows, channels]``."""
        return x.movedim(self.axis, -1).reshape(-1, x.shape[self.axis])

    def divide(self, graph: Graph, factor: Tensor, build: Builder) -> None:
        """Divide the value by channel factors, ``float32[channels]``, and multiply the weights that read it."""
        factor = factor.to(data_of(weight_of(self.layers[0])).device)  # one read from a file is on the CPU
        inverse = make_source_constant(1 / factor, f"{self.value.name}_smoothing")
        if self.source is not None:
            for position, axis in _find_scaled_operands(self.source):
                operand = self.source.inputs[position]
                if operand is not None:
                    made = DeferredConstant(scale_along_dim, (operand, inverse), (("axis", axis),))
                    graph.set_input(
                        self.source, position, build.constant(made, f"{operand.name}_smoothed", operand.type)
                    )
        else:
            small = build("mul", self.value, build.constant(1 / factor, inverse.name))
            for use in self.readers:
                graph.set_input(_user_node(use), int(use.position), small)
        multiplier = make_source_constant(factor, inverse.name)
        for node in self.layers:
            weight = weight_of(node)
            made = DeferredConstant(scale_input_channels, (weight, multiplier), (("groups", groups_of(node)),))
            graph.set_input(
                node, weight_position_of(node), build.constant(made, f"{weight.name}_smoothed", weight.type)
            )


def find_scalable_channels(graph: Graph, value: Value) -> ScalableChannels | None:
    """Return the channels of a value; None if they cannot be divided, or no weights can compensate.

    If the constants of the producer absorb the division, all readers must be layers, of any kind. A separate node
    serves the readers that multiply with a matrix; other readers keep the original value.
    """
    if value.type.dtype != torch.float32:
        return None
    readers = tuple(use for use in value.uses if _is_layer_use(graph, use))
    axes = {_user_node(use).op.trait.channel for use in readers}
    if len(axes) == 1 and len(readers) == len(value.uses):
        (axis,) = axes
        source = _find_scaling_node(graph, value, axis or 0)
        if source is not None:
            return ScalableChannels(value, axis or 0, readers, source)
    linear = tuple(use for use in readers if weight_of(_user_node(use)).type.rank == 2)
    return ScalableChannels(value, -1, linear, None) if linear else None


def split_weight_groups(weight: Tensor, groups: int) -> Tensor:
    """Reshape a weight ``[outputs, inputs / groups, ...]`` to ``[groups, outputs / groups, inputs / groups, ...]``."""
    return weight.reshape(groups, -1, *weight.shape[1:])


def _find_scaling_node(graph: Graph, value: Value, axis: int) -> Node | None:
    """Return the node with constants that scale the channels of a value; homogeneous nodes in between are skipped."""
    node = value.producer if value.index == 0 else None
    while node is not None and node.op.trait.is_homogeneous:
        inner = node.inputs[0]
        node = inner.producer if isinstance(inner, Value) and inner.index == 0 and len(inner.uses) == 1 else None
    if node is None:
        return None
    positions = _find_scaled_operands(node)
    operands = [node.inputs[position] for position, _ in positions]
    if not positions or operands[0] is None or not all(o is None or _is_scalable(graph, o) for o in operands):
        return None
    if node.op.trait.kind == COMPUTE_TRAIT:
        return node if axis == node.op.trait.channel else None
    return node if axis == -1 and operands[0].type.rank == 1 else None


def _find_scaled_operands(node: Node) -> list[tuple[int, int]]:
    """Return the operands, and their dims, along which the channels of a result are scaled."""
    trait = node.op.trait
    if trait.kind != COMPUTE_TRAIT:
        return [(position, 0) for position in trait.factors]
    if trait.axis != 0:
        return []
    return [(weight_position_of(node), 0), *([(trait.bias, 0)] if trait.bias is not None else [])]


def _is_layer_use(graph: Graph, use: Use) -> bool:
    """Return whether a use multiplies a value with a constant ``[outputs, inputs, ...]``."""
    node = use.user
    if (
        not isinstance(node, Node)
        or use.position != 0
        or node.op.trait.kind != COMPUTE_TRAIT
        or node.op.trait.axis != 0
    ):
        return False
    weight = node.inputs[weight_position_of(node)]
    return _is_scalable(graph, weight) and weight.type.rank > 1


def _is_scalable(graph: Graph, operand: Any) -> bool:
    """Return whether an operand is a float32 weight that no call changes."""
    return is_unchanged_constant(graph, operand) and operand.type.dtype == torch.float32


def _user_node(use: Use) -> Node:
    assert isinstance(use.user, Node)
    return use.user


def scale_along_dim(x: Tensor, factor: Tensor, *, axis: int) -> Tensor:
    """Multiply a constant by a factor for each index along a dim."""
    return x * reshape_along_dim(factor, axis, x.ndim)


def scale_input_channels(weight: Tensor, factor: Tensor, *, groups: int) -> Tensor:
    """Multiply a weight ``[outputs, inputs / groups, ...]`` by a factor for each of its input channels."""
    axes = (groups, 1, -1, *[1] * (weight.ndim - 2))
    return (split_weight_groups(weight, groups) * factor.reshape(axes)).reshape(weight.shape)
