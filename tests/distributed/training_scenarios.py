"""Scenarios of multi-process tests that train replicated or sharded models."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from calibrated_nets import HERE
from rank_models import (
    SHARDED,
    TOGETHER,
    Convolutions,
    catch_message,
    compile_for_training,
    compile_on_ranks,
    deal,
    make_images,
)
from seeded_tensors import randn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from clika_ref import clika_compile, clika_distribute
from clika_ref.serialization.container import write_extra_state


def mean_loss(model, data):
    return nn.functional.mse_loss(model(data), torch.ones(()))


def train(model, data, steps=4):
    """Train as any loop does; return the loss of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for number in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model, data[number])
        loss.backward()
        optimizer.step()
    return float(loss)


def make_halves():
    """Return the data of this rank, and of a single process: batches of four samples, two for each rank."""
    data, rank = [x / x.std() for x in make_images(4)], dist.get_rank()
    return [x[2 * rank : 2 * rank + 2] for x in data], data


def read_parameters(module):
    return {name: p.detach().flatten()[:6].tolist() for name, p in module.named_parameters()}


def digest_of(tensors):
    state = write_extra_state({}, {name: tensor.detach().clone() for name, tensor in tensors.items()})
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def digest(module):
    return digest_of(dict(module.named_parameters()))


def digest_with_buffers(module):
    return digest_of({name: tensor for name, tensor in module.state_dict().items() if name != "_extra_state"})


def train_alone():
    alone = compile_for_training(make_images(), distributed_training_settings=None)
    train(alone, make_halves()[1])
    return alone


def train_replicated():
    module = compile_for_training(deal(make_images()))
    model = clika_distribute(module, TOGETHER, steps=4)
    train(model, make_halves()[0])
    model.eval()
    found = {"kind": type(model).__name__, "numbers": read_parameters(module), "digest": digest(module)}
    if dist.get_rank() == 0:
        artifact = module.clika_export(Path(sys.argv[4]) / "replicated.onnx")
        found |= {"alone": read_parameters(train_alone()), "bytes": artifact.path.stat().st_size}
    dist.barrier()
    return found


def train_sharded():
    module = compile_for_training(deal(make_images()))
    model = clika_distribute(module, SHARDED, steps=4)
    train(model, make_halves()[0])
    local = sum(p.to_local().numel() for p in model.parameters())
    held = [v.data for v in module.clika_state.graph.constants.values()] + [
        v.data for v in module.clika_state.calibration.graph.constants.values()
    ]
    refused = catch_message(lambda: module.clika_export(Path(sys.argv[4]) / "none.onnx"))
    x = make_images(1)[0]
    with torch.no_grad():
        sharded = model.eval()(x)
        twice = model(x)
    train(model, make_halves()[0], steps=1)  # goes on, and what follows is that of new weights
    model.eval()
    whole = module.clika_gather()
    with torch.no_grad():
        later = model(x), whole(x)
    found = {
        "kind": type(model).__name__,
        "share": local / sum(p.numel() for p in whole.parameters()),
        "holds": sum(data is not None for data in held),
        "message": refused,
        "numbers": read_parameters(whole),
        "digest": digest(whole),
        "settings": [whole.clika_state.deployment == HERE, whole.clika_state.calibration is not None, whole.training],
        "same": [torch.equal(sharded, twice), torch.equal(*later), not torch.equal(sharded, later[0])],
    }
    if dist.get_rank() == 0:
        alone = train_alone()
        train(alone, make_halves()[1], steps=1)
        artifact = whole.clika_export(Path(sys.argv[4]) / "sharded.onnx")
        found |= {"alone": read_parameters(alone), "bytes": artifact.path.stat().st_size}
    dist.barrier()
    return found


def shard_without_clika():
    """Shard the module with FSDP directly, in eval mode, and train it."""
    module = fully_shard(compile_for_training(deal(make_images())))
    loss = train(module, make_halves()[0])
    return {"loss": loss, "whole": digest(module.clika_gather())}


def train_idle_weights():
    """Train a model with a layer that is never called and has no gradients."""
    model = Convolutions()
    model.idle = nn.Linear(3, 3)
    module = compile_on_ranks(model, deal(make_images()), tracing_inputs=[make_images(1)[0], make_images(1)[0][:2]])
    train(clika_distribute(module, TOGETHER), make_halves()[0])
    return {"digest": digest(module), "grads": [module.idle.weight.grad is None, module.head.weight.grad is None]}


def train_sharded_live_norms():
    """Train two steps with live norms, with statistics of each rank, and continue with these statistics."""
    module = clika_distribute(compile_for_training(deal(make_images())), SHARDED)
    module.clika_set_batch_norm("live")
    train(module, make_halves()[0], steps=2)
    own = module.stem._modules["1"].running_mean.tolist()
    x = make_images(1)[0]
    with torch.no_grad():
        live = module.eval()(x)
    train(module, make_halves()[0], steps=1)
    module.clika_set_batch_norm("frozen")
    statistics = digest_of(dict(module.named_buffers()))
    train(module, make_halves()[0], steps=1)
    divided = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    whole = module.eval().clika_gather()
    with torch.no_grad():
        same = torch.equal(module(x), whole(x))
    found = {"own": own, "live": live.tolist(), "statistics": statistics, "whole": digest_with_buffers(whole)}
    return {**found, "same": same, "divided": divided}


def shard_other_weights():
    """Shard a model with other weights on each rank: all start with those of the first rank."""
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(dist.get_rank())
    before = digest_with_buffers(module)
    return {"before": before, "whole": digest_with_buffers(clika_distribute(module, SHARDED).clika_gather())}


class Twins(nn.Module):
    """Two float layers with biases of one shape, which cleanup compares for equality."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.first(x).relu()) + x


def switch_modes_sharded():
    """Switch between training and evaluation, which quantizes whole weights."""
    data = randn(8, 4, 16)
    module = clika_distribute(compile_on_ranks(Twins(), deal(data), tracing_inputs=[data[0], data[0, :2]]), SHARDED)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    same = []
    for x in data[dist.get_rank() :: 4]:
        optimizer.zero_grad()
        mean_loss(module.train(), x).backward()
        optimizer.step()
        with torch.no_grad():
            same.append(torch.equal(module.eval()(data[0]), module.clika_gather()(data[0])))
    return {"same": same, "whole": digest(module.clika_gather())}


def shard_in_parts():
    module = compile_for_training(deal(make_images()))
    for part in ("stem", "head"):
        fully_shard(getattr(module, part))
    return {"message": catch_message(module.train)}


SCENARIOS = [
    *(train_replicated, train_sharded, switch_modes_sharded, train_sharded_live_norms, shard_other_weights),
    *(shard_without_clika, shard_in_parts, train_idle_weights),
]
