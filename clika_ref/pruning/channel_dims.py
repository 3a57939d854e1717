"""The channel dims of a layer that multiplies by weights, from the trait of its operator."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.core.ir import Node, Value
from clika_ref.quantization.qdq.layer_weights import groups_of

GROUP_DIM = 0
"""Dim of a weight along which the groups of its layer follow each other."""


@dataclass(frozen=True)
class ChannelDims:
    """The channel dims of a layer, in its input, weight and output."""

    x: Value
    weight: Value
    bias: Value | None
    outer: int
    """The weight's dim of output channels."""
    inner: int
    """The weight's dim of input channels."""
    channel: int
    """The channel dim of ``x``."""
    groups: int
    keeps_other_dims: bool
    """Whether the other dims of ``x`` are those of the result, as in a linear layer."""

    @property
    def unit_dim(self) -> int:
        """The weight's dim with the units of output channels; for a grouped layer, the dim of the groups."""
        return self.outer if self.groups == 1 else GROUP_DIM

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        outer = int(self.weight.type.shape[self.outer])
        return outer if self.outer == GROUP_DIM else outer * self.groups

    @property
    def in_channels_per_output(self) -> int:
        """Number of input channels per output channel."""
        inner = int(self.weight.type.shape[self.inner])
        return inner // self.groups if self.inner == GROUP_DIM else inner


def find_channel_dims(node: Node) -> ChannelDims | None:
    """Return the channel dims of a node, None if it multiplies by no weight of at least two dims."""
    trait = node.op.trait
    if trait.weight is None or trait.axis is None or trait.channel is None:
        return None
    x, weight = node.inputs[0], node.inputs[trait.weight]
    if not isinstance(x, Value) or not isinstance(weight, Value) or weight.type.rank < 2:
        return None
    is_matrix = trait.channel == -1  # the last dim, as in a linear layer
    if is_matrix and weight.type.rank > 2:
        return None  # a batched product with one matrix per head: no layer
    bias = None if trait.bias is None else node.inputs[trait.bias]
    outer = trait.axis % weight.type.rank if is_matrix else trait.axis
    return ChannelDims(
        x,
        weight,
        bias if isinstance(bias, Value) else None,
        outer,
        1 - outer,
        trait.channel % x.type.rank,
        groups_of(node),
        keeps_other_dims=is_matrix,
    )
