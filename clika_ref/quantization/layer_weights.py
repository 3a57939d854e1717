"""The weight of a layer, as the trait of its operator says where it stands, and the layer with another one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization_scheme import QuantizationScheme


def position_of(node: Node) -> int:
    """Return the position of the weight among the operands of a layer."""
    return node.op.trait.weight or 0


def weight_of(node: Node) -> Value:
    """Return the weight of a layer."""
    weight = node.inputs[position_of(node)]
    assert isinstance(weight, Value)
    return weight


def matrices_of(node: Node) -> list[Value]:
    """Return the weights of a layer that has several, and stays float; none where they are computed."""
    operands = node.inputs[node.op.trait.matrices or 0 :]
    return [v for v in operands if isinstance(v, Value) and v.is_constant and v.type.rank > 1]


def bias_of(node: Node) -> Any:
    """Return the bias of a layer, None where it has none."""
    return None if node.op.trait.bias is None else node.inputs[node.op.trait.bias]


def operands_but_bias(node: Node) -> list[Value]:
    """Return the tensors that must be integers where a node is to run in integers: a bias may be float."""
    return [v for position, v in enumerate(node.inputs) if isinstance(v, Value) and position != node.op.trait.bias]


def is_own(graph: Graph, operand: Any) -> bool:
    """Whether an operand is a constant of a graph, which no call changes."""
    return isinstance(operand, Value) and operand.is_constant and operand.name not in graph.state


def numbers_of(constant: Value) -> Tensor:
    """Return what a constant holds, without a history of gradients."""
    assert constant.data is not None
    return constant.data.detach()


def groups_of(node: Node) -> int:
    """Return into how many parts a layer divides its channels, each with weights of its own."""
    return int(node.attrs.get("groups", 1))


def scaled_side(node: Node, scheme: QuantizationScheme) -> int | None:
    """Return the side of a layer's weight along which a target wants scales, as its trait says; None for one in all."""
    is_stack = node.op.trait.axis is not None and node.op.trait.axis < 0 and weight_of(node).type.rank > 2
    return None if node.kind in scheme.one_scale and (is_stack or groups_of(node) > 1) else node.op.trait.axis


def with_weight(node: Node, weight: Tensor, x: Tensor) -> Tensor:
    """Return what a layer makes of elements with a weight in place of its own, and without a bias."""
    operands = [x, *node.inputs[1:]]
    operands[position_of(node)] = weight
    if node.op.trait.bias is not None:
        operands[node.op.trait.bias] = None
    return node.op(*operands, **node.attrs)
