"""The weight, bias and channels of a layer, at the positions that the trait of its operator declares."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme

MAX_MEAN_SAMPLES = 16
"""Maximum number of parts that an output is split into; its first dim may be that of positions, which are many."""


def weight_position_of(node: Node) -> int:
    """Return the position of the weight among the operands of a layer."""
    return node.op.trait.weight or 0


def weight_of(node: Node) -> Value:
    """Return the weight of a layer."""
    weight = node.inputs[weight_position_of(node)]
    assert isinstance(weight, Value)
    return weight


def matrices_of(node: Node) -> list[Value]:
    """Return the constant weights of a layer that has several and stays in float, such as a recurrent one."""
    operands = node.inputs[node.op.trait.matrices or 0 :]
    return [v for v in operands if isinstance(v, Value) and v.is_constant and v.type.rank > 1]


def bias_of(node: Node) -> Any:
    """Return the bias of a layer, None if it has none."""
    return None if node.op.trait.bias is None else node.inputs[node.op.trait.bias]


def non_bias_operands(node: Node) -> list[Value]:
    """Return the tensors that must be quantized for a node to run quantized; a bias may stay in float."""
    return [v for position, v in enumerate(node.inputs) if isinstance(v, Value) and position != node.op.trait.bias]


def is_unchanged_constant(graph: Graph, operand: Any) -> bool:
    """Return whether an operand is a constant of a graph that no call changes."""
    return isinstance(operand, Value) and operand.is_constant and not graph.is_overwritten(operand.name)


def data_of(constant: Value) -> Tensor:
    """Return the data of a constant, detached."""
    assert constant.data is not None
    return constant.data.detach()


def groups_of(node: Node) -> int:
    """Return the number of channel groups of a layer, each with its own weights."""
    return int(node.attrs.get("groups", 1))


def weight_scale_dim(node: Node, scheme: QuantizationScheme) -> int | None:
    """Return the dim of a layer's weight with a scale for each index on a target, None for a single scale."""
    is_stack = node.op.trait.axis is not None and node.op.trait.axis < 0 and weight_of(node).type.rank > 2
    return (
        None if node.op_type in scheme.per_tensor_weights and (is_stack or groups_of(node) > 1) else node.op.trait.axis
    )


def run_with_weight(node: Node, weight: Tensor, x: Tensor) -> Tensor:
    """Run a layer on ``x`` with another weight, and without its bias."""
    operands = [x, *node.inputs[1:]]
    operands[weight_position_of(node)] = weight
    if node.op.trait.bias is not None:
        operands[node.op.trait.bias] = None
    return node.op(*operands, **node.attrs)


def channel_means(node: Node, result: Tensor) -> Tensor:
    """Return the mean of each channel of a layer's output in each sample, ``float32[samples, channels]``.

    An output without a batch dim is one sample. More than `MAX_MEAN_SAMPLES` samples are averaged in groups of
    neighbors.
    """
    by_channel = result.movedim(node.op.trait.channel or 0, -1)
    *others, channels = by_channel.shape
    samples = result.shape[0] if result.ndim > 1 else 1
    means = by_channel.reshape(samples, math.prod(others) // max(samples, 1), channels).mean(1)
    if len(means) <= MAX_MEAN_SAMPLES:
        return means
    return torch.stack([part.mean(0) for part in means.tensor_split(MAX_MEAN_SAMPLES)])


def reshape_along_dim(vector: Tensor, dim: int, rank: int) -> Tensor:
    """Reshape ``vector[n]`` so that it broadcasts along one dim of a tensor.

    >>> reshape_along_dim(torch.ones(3), -2, 4).shape
    torch.Size([1, 1, 3, 1])
    """
    return vector.reshape([-1 if i == dim % rank else 1 for i in range(rank)])
