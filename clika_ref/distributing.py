"""``clika_distribute``: a compiled module that several processes train together."""

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
from clika_ref.distributed.deciding import refuse_other_settings
from clika_ref.distributed.ranks import Ranks, working_together
from clika_ref.distributed.sharding import hold_numbers_of_first
from clika_ref.distributed_settings import DistributedTrainingSettings
from clika_ref.module import ClikaModule
from clika_ref.saving.extra_state import write_extra_state

OTHER_PLAN = (
    "rank {} has another plan than rank 0, or weights of other shapes, so that they would train different models: "
    "compile on all ranks with DistributedTrainingSettings(multi_gpu=True), or load the same state dict on all"
)

OTHER_STEPS = (
    "the ranks have {} steps each, by their order: with the first one that has no more, the others would wait for it. "
    "Give all as many, as torch.utils.data.DistributedSampler(drop_last=True) and a DataLoader with drop_last=True do"
)


def clika_distribute(
    module: ClikaModule, settings: DistributedTrainingSettings | None, *, steps: int | None = None
) -> nn.Module:
    """Let the processes of ``torch.distributed`` train a module together; all of them call this.

    It returns what to train in its place, in the user's own loop: a ``DistributedDataParallel`` around the module, or
    the module itself with its weights divided among the processes (``fully_shard``) where ``use_sharding`` is set; as
    it is where ``multi_gpu`` is not. All begin with the weights and buffers of the first one; gradients are means over
    the ranks, those of scales too.

    Args:
        module: where its weights lie, there it is trained.
        settings: whether there are several processes, and what each holds; None, as ``multi_gpu=False``, is one.
        steps: how many steps this rank will take in each epoch, where it is known: with other numbers on other ranks,
            some would wait for ever.

    Raises:
        ModelError: ranks have different plans or numbers of steps, or train or divide other weights; another rank
            failed, there is no process group, or an argument is of another kind.
    """
    with working_together(settings) as ranks:
        if not isinstance(module, ClikaModule):
            msg = f"clika_distribute takes a ClikaModule, and {type(module).__name__} is none; compile it first"
            raise ModelError(msg)
        _refuse_differences(module, steps, ranks)
        refuse_other_settings(_alike(module, settings or DistributedTrainingSettings()), ranks)
    if settings is None or not settings.multi_gpu:
        return module
    device = next(module.parameters()).device
    if settings.use_sharding:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        hold_numbers_of_first([*module.parameters(), *module.buffers()], mesh)  # as DistributedDataParallel does
        divided: Any = fully_shard(module, mesh=mesh)
        divided.register_forward_hook(_divide_again)
        return divided
    devices = [device] if device.type != "cpu" else None
    return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=_has_idle_parameters(module))


def _has_idle_parameters(module: ClikaModule) -> bool:
    """Whether the graph reads a parameter nowhere, for whose gradient the first step would wait."""
    constants = module.graph.constants
    named = module.named_parameters()
    return any(p.requires_grad and name in constants and not constants[name].uses for name, p in named)


def _divide_again(module: nn.Module, _: Any, __: Any) -> None:
    """Divide the weights behind a call in eval mode, which nothing follows: FSDP leaves those of a whole model whole.

    An optimizer that is made then would be given these, which are no parameters, and train nothing, in silence.
    """
    if not module.training and isinstance(module, FSDPModule):
        module.reshard()


def _refuse_differences(module: ClikaModule, steps: int | None, ranks: Ranks) -> None:
    said = [document for document, _ in ranks.told_by_all(({"plan": _digest(module), "steps": steps}, {}))]
    other = [str(rank) for rank, document in enumerate(said) if document["plan"] != said[0]["plan"]]
    if other:
        raise ModelError(OTHER_PLAN.format(", ".join(other)))
    counts = [document["steps"] for document in said]
    if len({*counts}) > 1:
        raise ModelError(OTHER_STEPS.format(", ".join(map(str, counts))))


def _alike(module: ClikaModule, settings: DistributedTrainingSettings) -> dict[str, Any]:
    """Return what says which weights learn, and how they are held: with others, each rank has other gradients."""
    learned = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()}
    return {"batch_norm": module._clika_options.batch_norm, "use_sharding": settings.use_sharding, **learned}


def _digest(module: ClikaModule) -> str:
    """Return 64 hexadecimal digits, equal for equal plans and sides of weights."""
    quantized = module._clika_quantized
    document, tensors = quantized.saved() if quantized is not None else ({}, {})
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    saved: torch.Tensor = write_extra_state({**document, "shapes": shapes}, tensors)
    return hashlib.sha256(saved.numpy().tobytes()).hexdigest()
