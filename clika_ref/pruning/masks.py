"""Masks of weights: which stay, by magnitude, one by one or in patterns; a mask is a factor in the graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator

PREFIX = "clika.masks."
"""Of the names of masks, before that of the weight."""


def of_least_magnitude(weight: Tensor, share: float) -> Tensor:
    """Return the mask that takes out a share of the elements: those of least magnitude.

    >>> of_least_magnitude(torch.tensor([3.0, -1.0, 2.0, -4.0]), 0.5)
    tensor([ True, False, False,  True])
    """
    count = round(weight.numel() * share)
    mask = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.detach().abs().flatten().argsort(stable=True)[:count]] = False
    return mask.reshape(weight.shape)


def of_pattern(weight: Tensor, axis: int, kept: int, of: int) -> Tensor:
    """Return the mask that keeps the largest ``kept`` of every ``of`` elements that follow each other along a side.

    That is the side along which a layer multiplies and sums, as hardware wants it that skips zeros.

    >>> of_pattern(torch.tensor([[3.0, -1.0, 2.0, -4.0]]), 1, 2, 4)
    tensor([[ True, False, False,  True]])
    """
    rows = weight.detach().abs().movedim(axis, -1)
    blocks = rows.unflatten(-1, (-1, of))
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, order[..., :kept], value=True)
    return mask.flatten(-2).movedim(-1, axis)


def masked_by(weight: Value) -> tuple[Value, Value | None]:
    """Return the parameter that a weight is, and its mask, where it has one."""
    producer = weight.producer
    if producer is not None and producer.kind == "mul" and len(producer.inputs) == 2:
        parameter, mask = producer.inputs
        if isinstance(mask, Value) and mask.is_constant and mask.name.startswith(PREFIX):
            return parameter, mask
    return weight, None


def has_masks(graph: Graph) -> bool:
    """Whether weights of a graph are masked."""
    return any(name.startswith(PREFIX) for name in graph.constants)


def put_mask(graph: Graph, weight: Value, mask: Tensor, operators: Mapping[str, Operator]) -> None:
    """Mask a weight wherever it is read, and make zeros of what is masked; a mask that it has is replaced.

    The factor stays in the graph: whatever an optimizer does to the weight, what is masked counts as 0.

    Args:
        graph: of a module.
        weight: what a layer reads.
        mask: what stays of it.
        operators: of the registry.
    """
    parameter, old = masked_by(weight)
    assert parameter.data is not None
    kept = parameter.data.detach() * mask
    is_parameter = isinstance(parameter.data, nn.Parameter)
    parameter.data = nn.Parameter(kept, parameter.data.requires_grad) if is_parameter else kept
    if old is not None:
        old.data = mask
        graph.revision += 1
        return
    constant = graph.add_constant(mask, f"{PREFIX}{parameter.name}")
    readers = [use.user for use in parameter.uses if isinstance(use.user, Node)]
    first = next(node for node in graph.nodes if node in readers)
    factor = Node(operators["mul"], [parameter, constant], {}, first.origin)
    graph.insert(factor, [parameter.type], first, [f"{parameter.name}.masked"])
    for use in parameter.uses:
        if isinstance(use.user, Node) and use.user is not factor:
            graph.set_input(use.user, int(use.position), factor.output)
