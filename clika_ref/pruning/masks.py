"""Masks of weights, by magnitude, unstructured or in N:M patterns. The graph multiplies a weight by its mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator

MASK_PREFIX = "clika.masks."
"""Prefix of the names of masks, before the name of the weight."""


def make_magnitude_mask(weight: Tensor, share: float) -> Tensor:
    """Return a mask that is False for a share of the elements, those of least magnitude.

    Source: Han et al., Learning both Weights and Connections for Efficient Neural Networks (2015).

    >>> make_magnitude_mask(torch.tensor([3.0, -1.0, 2.0, -4.0]), 0.5)
    tensor([ True, False, False,  True])
    """
    count = round(weight.numel() * share)
    mask = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.detach().abs().flatten().argsort(stable=True)[:count]] = False
    return mask.reshape(weight.shape)


def make_pattern_mask(weight: Tensor, axis: int, kept: int, block: int) -> Tensor:
    """Return a mask that keeps the ``kept`` largest of every ``block`` consecutive elements along a dim.

    Sparse kernels require the reduction dim of the layer.

    Source: Mishra et al., Accelerating Sparse Deep Neural Networks (2021).

    >>> make_pattern_mask(torch.tensor([[3.0, -1.0, 2.0, -4.0]]), 1, 2, 4)
    tensor([[ True, False, False,  True]])
    """
    rows = weight.detach().abs().movedim(axis, -1)
    blocks = rows.unflatten(-1, (-1, block))
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, order[..., :kept], value=True)
    return mask.flatten(-2).movedim(-1, axis)


def split_mask(weight: Value) -> tuple[Value, Value | None]:
    """Return the parameter that a weight is computed from, and its mask or None."""
    producer = weight.producer
    if producer is not None and producer.op_type == "mul" and len(producer.inputs) == 2:
        parameter, mask = producer.inputs
        if isinstance(mask, Value) and mask.is_constant and mask.name.startswith(MASK_PREFIX):
            return parameter, mask
    return weight, None


def has_masks(graph: Graph) -> bool:
    """Whether weights of a graph are masked."""
    return any(name.startswith(MASK_PREFIX) for name in graph.constants)


def apply_mask(graph: Graph, weight: Value, mask: Tensor, operators: Mapping[str, Operator]) -> None:
    """Mask a weight for all its readers, and zero the masked elements; an existing mask is replaced.

    The multiplication stays in the graph, so that masked elements remain 0 when an optimizer updates the weight.

    Args:
        graph: the graph of a module.
        weight: the weight as read by a layer.
        mask: True for the elements to keep.
        operators: the operators of the registry.
    """
    parameter, old = split_mask(weight)
    assert parameter.data is not None
    kept = parameter.data.detach() * mask
    is_parameter = isinstance(parameter.data, nn.Parameter)
    parameter.data = nn.Parameter(kept, parameter.data.requires_grad) if is_parameter else kept
    if old is not None:
        old.data = mask
        graph.revision += 1
        return
    constant = graph.add_constant(mask, f"{MASK_PREFIX}{parameter.name}")
    readers = [use.user for use in parameter.uses if isinstance(use.user, Node)]
    first = next(node for node in graph.nodes if node in readers)
    factor = Node(operators["mul"], [parameter, constant], {}, first.origin)
    graph.insert(factor, [parameter.type], first, [f"{parameter.name}.masked"])
    for use in parameter.uses:
        if isinstance(use.user, Node) and use.user is not factor:
            graph.set_input(use.user, int(use.position), factor.output)
