"""``clika_distribute``: train a compiled module in several processes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from clika_ref.core.errors import ModelError
from clika_ref.distributed.decisions import check_same_settings
from clika_ref.distributed.ranks import Ranks, open_ranks
from clika_ref.module.clika_module import ClikaModule
from clika_ref.module.fsdp import broadcast_tensors
from clika_ref.serialization.container import write_extra_state
from clika_ref.settings.distributed import DistributedTrainingSettings

PLAN_MISMATCH = (
    "cannot train together: rank {} has another plan than rank 0, or weights of other shapes. Compile on all "
    "ranks with DistributedTrainingSettings(multi_gpu=True), or load the same state dict on all."
)

STEPS_MISMATCH = (
    "cannot train together: the ranks have {} steps, and some would wait forever. Give all ranks the same "
    "number, as torch.utils.data.DistributedSampler(drop_last=True) and a DataLoader with drop_last=True do."
)


def clika_distribute(
    module: ClikaModule, settings: DistributedTrainingSettings | None, *, steps: int | None = None
) -> nn.Module:
    """Wrap a module for training by all processes of ``torch.distributed``; all of them must call this.

    Train the returned module in your own loop: a ``DistributedDataParallel`` around the module, or, with
    ``use_sharding``, the module itself with its weights sharded (``fully_shard``). Without ``multi_gpu`` the module is
    returned unchanged. All ranks start from the weights and buffers of rank 0; gradients, including those of scales,
    are averaged over the ranks.

    Args:
        module: the module to train, on the device of its weights.
        settings: whether there are several processes, and whether they shard the weights; None, like
            ``multi_gpu=False``, means a single process.
        steps: the number of steps of this rank per epoch, if known. Ranks with different numbers would wait forever.

    Raises:
        ModelError: ranks have different plans or numbers of steps, or train or shard different weights; another rank
            failed, there is no process group, or an argument has the wrong type.
    """
    with open_ranks(settings) as ranks:
        if not isinstance(module, ClikaModule):
            raise ModelError(f"cannot distribute a {type(module).__name__}: it is no ClikaModule. Compile it first.")
        _check_same_plan(module, steps, ranks)
        check_same_settings(_settings_to_compare(module, settings or DistributedTrainingSettings()), ranks)
    if settings is None or not settings.multi_gpu:
        return module
    device = next(module.parameters()).device
    if settings.use_sharding:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        broadcast_tensors([*module.parameters(), *module.buffers()], mesh)  # as DistributedDataParallel does
        divided: Any = fully_shard(module, mesh=mesh)
        divided.register_forward_hook(_reshard_after_eval)
        return divided
    devices = [device] if device.type != "cpu" else None
    return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=_has_unused_parameters(module))


def _has_unused_parameters(module: ClikaModule) -> bool:
    """Whether a trainable parameter is unused in the graph; DDP would wait for its gradient."""
    constants = module.graph.constants
    named = module.named_parameters()
    return any(p.requires_grad and name in constants and not constants[name].uses for name, p in named)


def _reshard_after_eval(module: nn.Module, _: Any, __: Any) -> None:
    """Reshard the weights after a call in eval mode, since FSDP keeps the root module unsharded.

    An optimizer created then would get the unsharded tensors, which are no parameters, and silently train nothing.
    """
    if not module.training and isinstance(module, FSDPModule):
        module.reshard()


def _check_same_plan(module: ClikaModule, steps: int | None, ranks: Ranks) -> None:
    message = {"plan": _compute_digest(module), "steps": steps}
    documents = [document for document, _ in ranks.gather_messages((message, {}))]
    other = [str(rank) for rank, document in enumerate(documents) if document["plan"] != documents[0]["plan"]]
    if other:
        raise ModelError(PLAN_MISMATCH.format(", ".join(other)))
    counts = [document["steps"] for document in documents]
    if len({*counts}) > 1:
        raise ModelError(STEPS_MISMATCH.format(", ".join(map(str, counts))))


def _settings_to_compare(module: ClikaModule, settings: DistributedTrainingSettings) -> dict[str, Any]:
    """Return the settings that must agree on all ranks: the trainable parameters and how they are held."""
    learned = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()}
    return {"batch_norm": module.clika_state.options.batch_norm, "use_sharding": settings.use_sharding, **learned}


def _compute_digest(module: ClikaModule) -> str:
    """Return 64 hexadecimal digits that are equal for equal plans and weight shapes."""
    quantized = module.clika_state.quantized
    document, tensors = quantized.to_document() if quantized is not None else ({}, {})
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    saved: torch.Tensor = write_extra_state({**document, "shapes": shapes}, tensors)
    return hashlib.sha256(saved.numpy().tobytes()).hexdigest()
