"""The worker of multi-process tests: ``python multi_process_worker.py <group> <rank> <ranks> <folder>``.

Each scenario of a group returns what it found, which is written to ``<scenario>.<rank>.json`` for the tests to look at.
"""

import copy
import datetime as dt
import hashlib
import itertools
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from calibrated_nets import HERE, Net, batches

from clika_ref import (
    DeploymentSettings_TensorRT_ONNX,
    DistributedTrainingSettings,
    LayerQuantizationSettings,
    LoraSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
    clika_distribute,
)
from clika_ref.distributed import merging
from clika_ref.quantization.calibration import calibrator
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.calibration.range_table import statistics_to_json
from clika_ref.serialization.container import write_extra_state

TOGETHER = DistributedTrainingSettings(multi_gpu=True)
SHARDED = DistributedTrainingSettings(multi_gpu=True, use_sharding=True)
ALL = QuantizationSettings(quantization_sensitivity_threshold=1e9)
STRUCTURED = PruningSettings("structured", None, 0.5)
FEW_BITS = QuantizationSettings(
    weights_num_bits=[8, 4], weights_only_quantization_block_size=[16], prefer_weights_only_quantization=True
)


class Convolutions(nn.Module):
    """A norm behind a convolution, a depthwise one, and a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.deep(x)).mean((2, 3)))


def images(count=7):
    spread = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=spread) * (1 + i) for i in range(count)]


def dealt(data):
    """Return what this rank reads of data that is dealt in turns."""
    return [*itertools.islice(data, dist.get_rank(), None, dist.get_world_size())]


def compiled(model, data, settings=ALL, **options):
    """Compile a model on all ranks, or alone where these do not work multi_process_worker."""
    options = {"distributed_training_settings": TOGETHER, **options}
    how = {"quantization_settings": settings, "deployment_settings": HERE, "calibration_inputs": data}
    return clika_compile(model.eval(), **how, **options)


def plan_of(module):
    """Return a digest of all that was decided, and of the scales that were learned since."""
    saved = write_extra_state(*module.clika_state.quantized.to_document())
    return hashlib.sha256(saved.numpy().tobytes()).hexdigest()


def seen_by(module):
    """Return the calibration state of a module, in a form that does not depend on the number of ranks."""
    found = module.clika_state.calibration
    values = {name: statistics_to_json(statistics) for name, statistics in found.table.values.items()}
    for name, statistics in found.table.values.items():
        own = {"lows": statistics.lows.value, "highs": statistics.highs.value, "total": statistics.histogram.total}
        values[name] |= {**own, "counts": hashlib.sha256(statistics.histogram.counts.numpy().tobytes()).hexdigest()}
    kept = [[hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in inputs] for inputs in found.reservoir.batches]
    table = {"batches": found.table.batches, "first": found.table.first, "values": values}
    return {**table, "kept": kept, "is_full": found.reservoir.is_full, "sizes": sorted(found.sizes.items())}


def told(work):
    """Return the error message of a failing scenario."""
    try:
        work()
    except (ModelError, ValueError) as error:
        return str(error)
    return ""


def mean_of_ranks(model, data):
    return nn.functional.mse_loss(model(data), torch.ones(()))


# Quantizing


def both(model, data, settings=ALL, **options):
    """Return the decisions of several ranks, and those of one process on all data."""
    found = compiled(copy.deepcopy(model), dealt(data), settings, **options)
    alone = compiled(copy.deepcopy(model), data, settings, distributed_training_settings=None, **options)
    return {
        "plans": [plan_of(found), plan_of(alone)],
        "seen": [seen_by(found), seen_by(alone)],
        "layers": [str(found.clika_state.quantized.plan.floats), str(alone.clika_state.quantized.plan.floats)],
        "smoothed": len(found.clika_state.quantized.plan.smoothing),
        "weights": len(found.clika_state.quantized.plan.weights) + len(found.clika_state.quantized.plan.packed_weights),
    }


def linear_layers():
    return both(Net(), batches(7, factor=30.0), smoothing="on")


def convolutions():
    return both(Convolutions(), images())


def few_bits():
    return both(Net(), batches(7), FEW_BITS)


def by_an_option():
    options = {"weight_rounding": "on", "bias_correction": "on", "observer": "percentile-99.99"}
    return both(Convolutions(), images(), QuantizationSettings(), **options)


def a_small_reservoir():
    """Keep 3 of 7 batches, which the ranks must choose as one process does."""
    init = calibrator.Reservoir.__init__
    before = init.__defaults__
    init.__defaults__ = (4000, *before[1:])
    try:
        return both(Convolutions(), [x[:1] for x in images()])
    finally:
        init.__defaults__ = before


def uneven_data():
    """Deal five batches to the first rank and one to the other: turns, as far as they go."""
    data, folder = images(6), Path(sys.argv[4]) / f"logs{dist.get_rank()}"
    own = data[:1] + data[2:] if dist.get_rank() == 0 else data[1:2]
    found = compiled(Convolutions(), own, logs_dir=folder)
    alone = compiled(Convolutions(), data, distributed_training_settings=None)
    return {"plans": [plan_of(found), plan_of(alone)], "log": "".join(f.read_text() for f in folder.glob("*.log"))}


def no_data_on_one():
    own = images(2) if dist.get_rank() == 0 else []
    found = compiled(Convolutions(), own, tracing_inputs=images(1))
    alone = compiled(Convolutions(), images(2), distributed_training_settings=None, tracing_inputs=images(1))
    return {"plans": [plan_of(found), plan_of(alone)], "seen": [seen_by(found), seen_by(alone)]}


def quantized_later():
    """Quantize a module that is compiled already: with data, by another threshold without, and by a goal."""
    arguments = {"tracing_inputs": images(1), "deployment_settings": HERE}
    module = clika_compile(Convolutions().eval(), distributed_training_settings=TOGETHER, **arguments)
    alone = clika_compile(Convolutions().eval(), **arguments)
    plans = []
    for of, data in ((module, dealt(images())), (alone, images())):
        of.clika_initialize_algorithms(ALL, calibration_inputs=data)
        plans.append(plan_of(of))
        of.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=1e-4))
        plans.append(plan_of(of))
        scores = iter([1.0, 0.0, 1.0, 0.0, 1.0, 0.0] if of is alone or dist.get_rank() == 0 else [1.0] * 6)
        of.clika_quantize_to_goal(lambda _, scores=scores: next(scores), 0.5)
        plans.append(plan_of(of) if of.clika_state.quantized else "float")
    return {"plans": plans}


def pruned():
    """Prune on the tracing inputs, for which those of the first rank are used."""
    settings = {"pruning_settings": STRUCTURED, "deployment_settings": HERE}
    data = [x * (1 + 5 * dist.get_rank()) for x in images(2)]
    found = clika_compile(
        Convolutions().eval(), tracing_inputs=data, distributed_training_settings=TOGETHER, **settings
    )
    alone = clika_compile(Convolutions().eval(), tracing_inputs=images(2), **settings)
    later = clika_compile(Convolutions().eval(), tracing_inputs=data, distributed_training_settings=TOGETHER)
    later.clika_prune(STRUCTURED)
    return {"models": [fingerprint(module.graph) for module in (found, alone, later)]}


def pruned_by_dealt_data():
    """Prune on data, with several batches for the importance, during compilation and later."""
    strengths = torch.tensor([9.0, 1.0, 0.1]).reshape(3, 1, 1)
    data = [(x * strengths).roll(number % 2, 1) for number, x in enumerate(images(12))]
    found, alone = (
        compiled(Convolutions(), own, tracing_inputs=data[:1], pruning_settings=STRUCTURED, **how)
        for own, how in ((dealt(data), {}), (data, {"distributed_training_settings": None}))
    )
    later = clika_compile(Convolutions().eval(), tracing_inputs=data[:1], distributed_training_settings=TOGETHER)
    later.clika_prune(STRUCTURED, calibration_inputs=dealt(data))
    of_first = clika_compile(Convolutions().eval(), tracing_inputs=data[:1])
    of_first.clika_prune(STRUCTURED, calibration_inputs=data[::2])
    return {
        "plans": [plan_of(found), plan_of(alone)],
        "models": [fingerprint(module.graph) for module in (found, alone, later)],
        "of the first": fingerprint(of_first.graph),
    }


def adapted():
    """Attach adapters, which are drawn at random, otherwise on each rank: as the module is compiled, and later."""
    data, models = images(2), [Convolutions(), Convolutions()]
    torch.manual_seed(dist.get_rank())
    found = compiled(models[0], dealt(data), global_lora_settings=LoraSettings(rank=2))
    later = compiled(models[1], dealt(data))
    later.clika_attach_lora(LoraSettings(rank=2))
    return {"models": [fingerprint(m.graph) for m in (found, later)], "plans": [plan_of(m) for m in (found, later)]}


# Failing


def spoiled(rank, number):
    data = dealt(images())
    if dist.get_rank() == rank:
        data[number] = torch.full_like(data[number], torch.nan)
    return data


def nan_on_one():
    return {"told": told(lambda: compiled(Convolutions(), spoiled(1, 1)))}


def nan_in_the_first():
    return {"told": told(lambda: compiled(Convolutions(), spoiled(0, 0)))}


def no_data_on_the_first():
    own = [] if dist.get_rank() == 0 else images(2)
    return {"told": told(lambda: compiled(Convolutions(), own, tracing_inputs=images(1)))}


def an_error_of_the_users_on_one():
    def broken():
        yield images(1)[0]
        if dist.get_rank() == 1:
            msg = "the disk is gone"
            raise OSError(msg)

    try:
        compiled(Convolutions(), broken())
    except (ModelError, OSError) as error:
        return {"told": f"{type(error).__name__}: {error}"}
    return {"told": ""}


def an_error_before_counts_are_summed():
    """Fail on one rank between its message and the reduction."""
    before = merging.statistics_from_json
    if dist.get_rank() == 1:
        merging.statistics_from_json = None
    try:
        compiled(Convolutions(), dealt(images()))
    except (ModelError, TypeError) as error:
        return {"told": f"{type(error).__name__}: {error}"}
    finally:
        merging.statistics_from_json = before
    return {"told": ""}


def an_error_on_both():
    data = [x if place < 2 else x * torch.nan for place, x in enumerate(images())]
    return {"told": told(lambda: compiled(Convolutions(), dealt(data)))}


def other_weights():
    model = Convolutions()
    model.head.weight.data += dist.get_rank()
    return {"told": told(lambda: compiled(model, dealt(images())))}


def differing(arguments, **of_second):
    """Compile with different arguments on the second rank."""
    arguments = {"calibration_inputs": dealt(images()), "deployment_settings": HERE, **arguments}
    own = {**arguments, **(of_second if dist.get_rank() else {})}
    return {"told": told(lambda: clika_compile(Convolutions().eval(), distributed_training_settings=TOGETHER, **own))}


def other_targets():
    return differing({"quantization_settings": ALL}, deployment_settings=DeploymentSettings_TensorRT_ONNX())


def other_options():
    return differing({"quantization_settings": ALL}, batch_norm="live", check_passes=True)


def other_thresholds():
    return differing({"quantization_settings": ALL}, quantization_settings=QuantizationSettings())


def float_on_one():
    return differing({"quantization_settings": ALL}, quantization_settings=None)


def other_settings_later():
    """Prune, adapt and quantize by other settings on the second rank."""
    rank = dist.get_rank()
    module = clika_compile(
        Convolutions().eval(),
        tracing_inputs=images(1),
        deployment_settings=HERE,
        distributed_training_settings=TOGETHER,
    )
    layers = {"head": LayerQuantizationSettings(skip_quantization=True)} if rank else None
    data = {"calibration_inputs": dealt(images())}
    steps = [
        lambda: module.clika_prune(PruningSettings("structured", None, 0.5 + rank / 4)),
        lambda: module.clika_attach_lora(LoraSettings(rank=2 + rank)),
        lambda: module.clika_initialize_algorithms(ALL, layer_quantization_settings=layers, **data),
        lambda: module.clika_initialize_algorithms(ALL, **({} if rank else data)),
    ]
    return {"told": " / ".join(map(told, steps))}


def arguments_on_one():
    """Pass invalid arguments on the second rank only, during compilation and later."""
    rank = dist.get_rank()
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1), distributed_training_settings=TOGETHER)
    steps = [
        lambda: compiled(Convolutions(), None if rank else images(1)),
        lambda: compiled(Convolutions(), images(1), **({"no_option": 1} if rank else {})),
        lambda: module.clika_prune(3 if rank else STRUCTURED),
        lambda: module.clika_attach_lora(4 if rank else None),
        lambda: module.clika_initialize_algorithms(5 if rank else ALL, calibration_inputs=images(1)),
        lambda: clika_distribute(6 if rank else module, TOGETHER),
        lambda: module.clika_quantize_to_goal(7 if rank else abs, 0.5, calibration_inputs=images(1)),
    ]
    return {"told": [*map(told, steps)]}


def a_file_of_ranges():
    file = Path(sys.argv[4]) / "ranges"
    return {"told": told(lambda: compiled(Convolutions(), dealt(images()), ranges_file=str(file)))}


# Training


def to_train(data, **options):
    """Compile what takes batches of any size."""
    return compiled(Convolutions(), data, tracing_inputs=[images(1)[0], images(1)[0][:2]], **options)


def trained(model, data, steps=4):
    """Train as any loop does; return the loss of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for number in range(steps):
        optimizer.zero_grad()
        loss = mean_of_ranks(model, data[number])
        loss.backward()
        optimizer.step()
    return float(loss)


def halves():
    """Return the data of this rank, and of a single process: batches of four samples, two for each rank."""
    data, rank = [x / x.std() for x in images(4)], dist.get_rank()
    return [x[2 * rank : 2 * rank + 2] for x in data], data


def numbers_of(module):
    return {name: p.detach().flatten()[:6].tolist() for name, p in module.named_parameters()}


def digest_of(tensors):
    state = write_extra_state({}, {name: tensor.detach().clone() for name, tensor in tensors.items()})
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def digest(module):
    return digest_of(dict(module.named_parameters()))


def digest_with_buffers(module):
    return digest_of({name: tensor for name, tensor in module.state_dict().items() if name != "_extra_state"})


def trained_by_one():
    alone = to_train(images(), distributed_training_settings=None)
    trained(alone, halves()[1])
    return alone


def replicated_training():
    module = to_train(dealt(images()))
    model = clika_distribute(module, TOGETHER, steps=4)
    trained(model, halves()[0])
    model.eval()
    found = {"kind": type(model).__name__, "numbers": numbers_of(module), "digest": digest(module)}
    if dist.get_rank() == 0:
        artifact = module.clika_export(Path(sys.argv[4]) / "replicated.onnx")
        found |= {"alone": numbers_of(trained_by_one()), "bytes": artifact.path.stat().st_size}
    dist.barrier()
    return found


def sharded_training():
    module = to_train(dealt(images()))
    model = clika_distribute(module, SHARDED, steps=4)
    trained(model, halves()[0])
    local = sum(p.to_local().numel() for p in model.parameters())
    held = [v.data for v in module.clika_state.graph.constants.values()] + [
        v.data for v in module.clika_state.calibration.graph.constants.values()
    ]
    refused = told(lambda: module.clika_export(Path(sys.argv[4]) / "none.onnx"))
    x = images(1)[0]
    with torch.no_grad():
        sharded = model.eval()(x)
        twice = model(x)
    trained(model, halves()[0], steps=1)  # goes on, and what follows is that of new weights
    model.eval()
    whole = module.clika_gather()
    with torch.no_grad():
        later = model(x), whole(x)
    found = {
        "kind": type(model).__name__,
        "share": local / sum(p.numel() for p in whole.parameters()),
        "holds": sum(data is not None for data in held),
        "told": refused,
        "numbers": numbers_of(whole),
        "digest": digest(whole),
        "settings": [whole.clika_state.deployment == HERE, whole.clika_state.calibration is not None, whole.training],
        "same": [torch.equal(sharded, twice), torch.equal(*later), not torch.equal(sharded, later[0])],
    }
    if dist.get_rank() == 0:
        alone = trained_by_one()
        trained(alone, halves()[1], steps=1)
        artifact = whole.clika_export(Path(sys.argv[4]) / "sharded.onnx")
        found |= {"alone": numbers_of(alone), "bytes": artifact.path.stat().st_size}
    dist.barrier()
    return found


def sharded_by_the_user():
    """Divide the module without asking, in eval mode, and train it."""
    module = fully_shard(to_train(dealt(images())))
    loss = trained(module, halves()[0])
    return {"loss": loss, "whole": digest(module.clika_gather())}


def replicated_with_idle_weights():
    """Train a model of which a layer is never called, which has no gradients."""
    model = Convolutions()
    model.idle = nn.Linear(3, 3)
    module = compiled(model, dealt(images()), tracing_inputs=[images(1)[0], images(1)[0][:2]])
    trained(clika_distribute(module, TOGETHER), halves()[0])
    return {"digest": digest(module), "grads": [module.idle.weight.grad is None, module.head.weight.grad is None]}


def sharded_with_live_norms():
    """Train two steps with live norms, with statistics of each rank, and continue with these statistics."""
    module = clika_distribute(to_train(dealt(images())), SHARDED)
    module.clika_set_batch_norm("live")
    trained(module, halves()[0], steps=2)
    own = module.stem._modules["1"].running_mean.tolist()
    x = images(1)[0]
    with torch.no_grad():
        live = module.eval()(x)
    trained(module, halves()[0], steps=1)
    module.clika_set_batch_norm("frozen")
    statistics = digest_of(dict(module.named_buffers()))
    trained(module, halves()[0], steps=1)
    divided = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    whole = module.eval().clika_gather()
    with torch.no_grad():
        same = torch.equal(module(x), whole(x))
    found = {"own": own, "live": live.tolist(), "statistics": statistics, "whole": digest_with_buffers(whole)}
    return {**found, "same": same, "divided": divided}


def sharded_from_other_weights():
    """Divide a model whose weights differ between ranks: all begin with those of the first one."""
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(dist.get_rank())
    before = digest_with_buffers(module)
    return {"before": before, "whole": digest_with_buffers(clika_distribute(module, SHARDED).clika_gather())}


class Twins(nn.Module):
    """Two layers with biases of one shape, which stay float: cleaning looks at them, to find whether they are equal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.first(x).relu()) + x


def sharded_twins():
    """Go back and forth between training and evaluation, for which integers are made of whole weights."""
    data = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
    module = clika_distribute(compiled(Twins(), dealt(data), tracing_inputs=[data[0], data[0, :2]]), SHARDED)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    same = []
    for x in data[dist.get_rank() :: 4]:
        optimizer.zero_grad()
        mean_of_ranks(module.train(), x).backward()
        optimizer.step()
        with torch.no_grad():
            same.append(torch.equal(module.eval()(data[0]), module.clika_gather()(data[0])))
    return {"same": same, "whole": digest(module.clika_gather())}


def sharded_in_parts():
    module = to_train(dealt(images()))
    for part in ("stem", "head"):
        fully_shard(getattr(module, part))
    return {"told": told(module.train)}


def other_plans():
    module = to_train(dealt(images()), distributed_training_settings=None)
    return {"told": told(lambda: clika_distribute(module, TOGETHER))}


def other_shapes():
    """Shard models of different shapes, so that tensors of one rank do not fit on the other."""
    model = nn.Linear(4, 4 + dist.get_rank()).eval()
    return {"told": told(lambda: clika_distribute(clika_compile(model, tracing_inputs=[torch.ones(2, 4)]), SHARDED))}


def other_norms():
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1))
    module.clika_set_batch_norm("live" if dist.get_rank() else "frozen")
    return {"told": told(lambda: clika_distribute(module, TOGETHER))}


def other_frozen_weights():
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1))
    module.head.weight.requires_grad_(not dist.get_rank())
    return {"told": told(lambda: clika_distribute(module, TOGETHER))}


def divided_on_one():
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1))
    return {"told": told(lambda: clika_distribute(module, SHARDED if dist.get_rank() else TOGETHER))}


def other_steps():
    module = clika_compile(Convolutions().eval(), tracing_inputs=images(1))
    return {"told": told(lambda: clika_distribute(module, TOGETHER, steps=3 + dist.get_rank()))}


def unasked():
    folder = Path(sys.argv[4]) / f"unasked{dist.get_rank()}"
    to_train(dealt(images()), distributed_training_settings=None, logs_dir=folder)
    return {"log": "".join(f.read_text() for f in folder.glob("*.log"))}


# Ending


def ends_meanwhile():
    """Let the other rank end while the data is read."""

    def data():
        yield images(1)[0]
        if dist.get_rank() == 1:
            os._exit(3)

    return {"told": told(lambda: to_train(data()))}


def hangs():
    """Let the other rank be slower than the process group waits."""

    def data():
        yield images(1)[0]
        if dist.get_rank() == 1:
            time.sleep(12)

    began = time.monotonic()
    return {"told": told(lambda: to_train(data())), "seconds": time.monotonic() - began}


GROUPS = {
    "quantizing": [
        *(linear_layers, convolutions, few_bits, by_an_option, a_small_reservoir, uneven_data, no_data_on_one),
        *(quantized_later, pruned, pruned_by_dealt_data, adapted, unasked),
    ],
    "failing": [
        *(nan_on_one, nan_in_the_first, no_data_on_the_first, an_error_of_the_users_on_one, an_error_on_both),
        *(an_error_before_counts_are_summed,),
        *(other_targets, other_options, other_thresholds, float_on_one, other_settings_later),
        *(arguments_on_one,),
        *(other_norms, other_frozen_weights, divided_on_one),
        *(other_weights, a_file_of_ranges, other_plans, other_shapes, other_steps, convolutions),
    ],
    "training": [
        *(replicated_training, sharded_training, sharded_twins, sharded_with_live_norms, sharded_from_other_weights),
        *(sharded_by_the_user, sharded_in_parts, replicated_with_idle_weights),
    ],
    "ending": [ends_meanwhile],
    "hanging": [hangs],
}
TIMEOUTS = {"hanging": 4}


def main(group, rank, ranks, folder):
    """Run the scenarios of a group as one of its processes."""
    warnings.simplefilter("ignore")  # of torch.distributed, of which each version has others
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{group}.store",
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=TIMEOUTS.get(group, 120)),
    )
    for scenario in GROUPS[group]:
        found = scenario()
        (Path(folder) / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
