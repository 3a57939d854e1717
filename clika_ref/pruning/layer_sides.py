"""Where a layer that multiplies by weights has its channels, as the trait of its operator states."""

from __future__ import annotations

from dataclasses import dataclass

from clika_ref.core.ir import Node, Value
from clika_ref.quantization.layer_weights import groups_of


@dataclass(frozen=True)
class LayerSides:
    """The channels of a layer, on the sides of what it reads, of its weight, and of what it returns."""

    x: Value
    weight: Value
    bias: Value | None
    outer: int
    """The side of the weight of output channels."""
    inner: int
    """That of input channels."""
    channel: int
    """The side of channels of ``x``."""
    groups: int
    passes_others: bool
    """Whether the other sides of ``x`` are those of the result, as of a linear layer."""

    @property
    def grouped_axis(self) -> int:
        """The side of the weight along which groups follow each other: that of all channels of one kind."""
        return 0

    @property
    def making(self) -> int:
        """The side of the weight that has the units of output channels: of groups, that along which these follow."""
        return self.outer if self.groups == 1 else self.grouped_axis

    @property
    def out_channels(self) -> int:
        """How many channels it returns."""
        outer = int(self.weight.type.shape[self.outer])
        return outer if self.outer == self.grouped_axis else outer * self.groups

    @property
    def inputs_of_one_output(self) -> int:
        """How many input channels each output is made of."""
        inner = int(self.weight.type.shape[self.inner])
        return inner // self.groups if self.inner == self.grouped_axis else inner


def layer_sides(node: Node) -> LayerSides | None:
    """Return where a node has its channels, None where it multiplies by no weight of two sides or more."""
    trait = node.op.trait
    if trait.weight is None or trait.axis is None or trait.channel is None:
        return None
    x, weight = node.inputs[0], node.inputs[trait.weight]
    if not isinstance(x, Value) or not isinstance(weight, Value) or weight.type.rank < 2:
        return None
    is_matrix = trait.channel == -1  # the last side, as of a linear layer
    if is_matrix and weight.type.rank > 2:
        return None  # a product of as many matrices as there are heads: no layer
    bias = None if trait.bias is None else node.inputs[trait.bias]
    outer = trait.axis % weight.type.rank if is_matrix else trait.axis
    return LayerSides(
        x,
        weight,
        bias if isinstance(bias, Value) else None,
        outer,
        1 - outer,
        trait.channel % x.type.rank,
        groups_of(node),
        passes_others=is_matrix,
    )
