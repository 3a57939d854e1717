"""Weights that are divided among processes (FSDP): whole where something is made of them, and divided again behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.weights import IN_PARTS


def is_divided(module: nn.Module) -> bool:
    """Whether a module holds parts of its weights, of which other processes hold the others."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@contextlib.contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Let a module hold its whole weights in a block; where they are divided, all ranks call it.

    Raises:
        ModelError: parts of the module are divided each by itself.
    """
    if not is_divided(module):
        yield
        return
    divided: Any = module
    if not hasattr(divided, "unshard"):  # what fully_shard gives to what it divides
        raise ModelError(IN_PARTS)
    divided.unshard()
    try:
        yield
    finally:
        divided.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; of one that is divided, with the parts of all ranks, which all call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def let_go(*graphs: Graph) -> None:
    """Let graphs hold no weights, which would stay in memory whole; they are bound to others before they are used."""
    for graph in graphs:
        for value in graph.constants.values():
            value.data = None
