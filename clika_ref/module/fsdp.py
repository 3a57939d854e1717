"""Sharded weights (FSDP): unshard them where whole weights are needed, and reshard them afterwards."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from clika_ref.compiled.state import CompiledModule
from clika_ref.compiled.weights import PARTS_SHARDED
from clika_ref.core.errors import ModelError


def is_sharded(module: nn.Module) -> bool:
    """Whether the weights of a module are sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def broadcast_tensors(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Broadcast unsharded tensors from rank 0, as ``DistributedDataParallel`` does; all ranks call it.

    Tensors that are sharded already, or on another device than the mesh, which its backend may not support, are
    skipped.
    """
    for tensor in tensors:
        if tensor.device.type == mesh.device_type and not isinstance(tensor, DTensor):
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            for dim in range(mesh.ndim):  # as bytes, which each backend sends
                dist.broadcast(copy.reshape(-1).view(torch.uint8), group=mesh.get_group(dim), group_src=0)
            if not torch.equal(copy, tensor):  # a write would count as a change of the weight
                with torch.no_grad():
                    tensor.copy_(copy)


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast the buffers of a sharded module from rank 0; all ranks call it.

    Live batch norms accumulate the statistics of their own rank, while evaluation needs equal ones on all ranks.
    """
    parts = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    if parts:
        broadcast_tensors(module.buffers(), parts[0].device_mesh)


@contextlib.contextmanager
def unshard_weights(module: nn.Module) -> Iterator[None]:
    """Unshard the weights of a module within a block; if they are sharded, all ranks call it.

    Raises:
        ModelError: parts of the module are sharded separately.
    """
    if not is_sharded(module):
        yield
        return
    divided: Any = module
    if not hasattr(divided, "unshard"):  # added by fully_shard
        raise ModelError(PARTS_SHARDED)
    divided.unshard()
    try:
        yield
    finally:
        divided.reshard()


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor; if it is sharded, all ranks call it and it is gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


AnyModule = TypeVar("AnyModule", bound=CompiledModule)


def gather(module: AnyModule, make_empty: Callable[[], AnyModule]) -> AnyModule:
    """Return a module with the whole weights of a sharded one, and its state; all ranks call it."""
    if not is_sharded(module) and not hasattr(module, "unshard"):  # kept while weights are whole
        return module
    broadcast_buffers(module)
    found, state = make_empty(), module.clika_state
    found.load_state_dict({name: gather_full_tensor(tensor) for name, tensor in module.state_dict().items()})
    gathered = found.clika_state
    gathered.configure(state.deployment, state.options, state.logs_dir, state.distributed)
    gathered.calibration, gathered.request = state.calibration, state.request
    gathered.examples, gathered.example_sizes = state.examples, Counter(state.example_sizes)
    return found.train(module.training)
