"""Weights that are divided among processes (FSDP): whole where something is made of them, and divided again behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.weights import IN_PARTS


def is_divided(module: nn.Module) -> bool:
    """Whether a module holds parts of its weights, of which other processes hold the others."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def hold_numbers_of_first(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Let whole tensors hold what those of the first rank do, as ``DistributedDataParallel`` does; all ranks call it.

    Those that are divided already, or on another device than the mesh, which its backend may not reach, stay as they
    are.
    """
    for tensor in tensors:
        if tensor.device.type == mesh.device_type and not isinstance(tensor, DTensor):
            held = tensor.detach().clone(memory_format=torch.contiguous_format)
            for side in range(mesh.ndim):  # as bytes, which each backend sends
                dist.broadcast(held.reshape(-1).view(torch.uint8), group=mesh.get_group(side), group_src=0)
            if not torch.equal(held, tensor):  # a write would count as another weight
                with torch.no_grad():
                    tensor.copy_(held)


def hold_buffers_of_first(module: nn.Module) -> None:
    """Let a module have the buffers of the first rank, where its weights are divided: all ranks call it.

    Live batch norms count statistics of the batches of their own rank, and a model that is evaluated has one.
    """
    parts = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    if parts:
        hold_numbers_of_first(module.buffers(), parts[0].device_mesh)


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
