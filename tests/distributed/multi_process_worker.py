"""The worker of multi-process tests: ``python multi_process_worker.py <group> <rank> <ranks> <folder>``.

Each scenario of a group returns its results, which are written to ``<scenario>.<rank>.json`` for the tests to read.
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
from calibrated_nets import HERE, Net, make_batches
from log_files import read_logs
from seeded_tensors import randn

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
LOW_BIT = QuantizationSettings(
    weights_num_bits=[8, 4], weights_only_quantization_block_size=[16], prefer_weights_only_quantization=True
)


class Convolutions(nn.Module):
    """A convolution with batch norm, a depthwise one, and a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.deep(x)).mean((2, 3)))


def make_images(count=7):
    spread = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=spread) * (1 + i) for i in range(count)]


def deal(data):
    """Return the batches of this rank, of data dealt in turns."""
    return [*itertools.islice(data, dist.get_rank(), None, dist.get_world_size())]


def compile_on_ranks(model, data, settings=ALL, **options):
    """Compile a model on all ranks together, or on each alone without distributed settings."""
    options = {"distributed_training_settings": TOGETHER, **options}
    how = {"quantization_settings": settings, "deployment_settings": HERE, "calibration_inputs": data}
    return clika_compile(model.eval(), **how, **options)


def digest_plan(module):
    """Return a digest of the plan, and of the scales that were learned since."""
    saved = write_extra_state(*module.clika_state.quantized.to_document())
    return hashlib.sha256(saved.numpy().tobytes()).hexdigest()


def read_calibration(module):
    """Return the calibration state of a module, in a form that does not depend on the number of ranks."""
    found = module.clika_state.calibration
    values = {name: statistics_to_json(statistics) for name, statistics in found.table.values.items()}
    for name, statistics in found.table.values.items():
        own = {"lows": statistics.lows.value, "highs": statistics.highs.value, "total": statistics.histogram.total}
        values[name] |= {**own, "counts": hashlib.sha256(statistics.histogram.counts.numpy().tobytes()).hexdigest()}
    kept = [[hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in inputs] for inputs in found.reservoir.batches]
    table = {"batches": found.table.batches, "first": found.table.first, "values": values}
    return {**table, "kept": kept, "is_full": found.reservoir.is_full, "sizes": sorted(found.sizes.items())}


def catch_message(work):
    """Return the error message of a failing scenario."""
    try:
        work()
    except (ModelError, ValueError) as error:
        return str(error)
    return ""


def mean_loss(model, data):
    return nn.functional.mse_loss(model(data), torch.ones(()))


# Quantizing


def compile_together_and_alone(model, data, settings=ALL, **options):
    """Return the decisions of several ranks, and those of one process on all data."""
    found = compile_on_ranks(copy.deepcopy(model), deal(data), settings, **options)
    alone = compile_on_ranks(copy.deepcopy(model), data, settings, distributed_training_settings=None, **options)
    return {
        "plans": [digest_plan(found), digest_plan(alone)],
        "seen": [read_calibration(found), read_calibration(alone)],
        "layers": [str(found.clika_state.quantized.plan.floats), str(alone.clika_state.quantized.plan.floats)],
        "smoothed": len(found.clika_state.quantized.plan.smoothing),
        "weights": len(found.clika_state.quantized.plan.weights) + len(found.clika_state.quantized.plan.packed_weights),
    }


def linear_layers():
    return compile_together_and_alone(Net(), make_batches(7, factor=30.0), smooth_quant="on")


def convolutions():
    return compile_together_and_alone(Convolutions(), make_images())


def int4():
    return compile_together_and_alone(Net(), make_batches(7), LOW_BIT)


def by_each_option():
    options = {"gptq": "on", "bias_correction": "on", "observer": "percentile-99.99"}
    return compile_together_and_alone(Convolutions(), make_images(), QuantizationSettings(), **options)


def small_reservoir():
    """Keep 3 of 7 batches; the ranks must choose the same ones as one process."""
    init = calibrator.Reservoir.__init__
    before = init.__defaults__
    init.__defaults__ = (4000, *before[1:])
    try:
        return compile_together_and_alone(Convolutions(), [x[:1] for x in make_images()])
    finally:
        init.__defaults__ = before


def uneven_data():
    """Deal five batches to the first rank and one to the other, in turns."""
    data, folder = make_images(6), Path(sys.argv[4]) / f"logs{dist.get_rank()}"
    own = data[:1] + data[2:] if dist.get_rank() == 0 else data[1:2]
    found = compile_on_ranks(Convolutions(), own, logs_dir=folder)
    alone = compile_on_ranks(Convolutions(), data, distributed_training_settings=None)
    return {
        "plans": [digest_plan(found), digest_plan(alone)],
        "log": read_logs(folder),
    }


def no_data_on_one():
    own = make_images(2) if dist.get_rank() == 0 else []
    found = compile_on_ranks(Convolutions(), own, tracing_inputs=make_images(1))
    alone = compile_on_ranks(
        Convolutions(), make_images(2), distributed_training_settings=None, tracing_inputs=make_images(1)
    )
    return {
        "plans": [digest_plan(found), digest_plan(alone)],
        "seen": [read_calibration(found), read_calibration(alone)],
    }


def requantize():
    """Quantize a module that is compiled already: with data, by another threshold without, and by a goal."""
    arguments = {"tracing_inputs": make_images(1), "deployment_settings": HERE}
    module = clika_compile(Convolutions().eval(), distributed_training_settings=TOGETHER, **arguments)
    alone = clika_compile(Convolutions().eval(), **arguments)
    plans = []
    for of, data in ((module, deal(make_images())), (alone, make_images())):
        of.clika_initialize_algorithms(ALL, calibration_inputs=data)
        plans.append(digest_plan(of))
        of.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=1e-4))
        plans.append(digest_plan(of))
        scores = iter([1.0, 0.0, 1.0, 0.0, 1.0, 0.0] if of is alone or dist.get_rank() == 0 else [1.0] * 6)
        of.clika_quantize_to_goal(lambda _, scores=scores: next(scores), 0.5)
        plans.append(digest_plan(of) if of.clika_state.quantized else "float")
    return {"plans": plans}


def prune():
    """Prune on the tracing inputs, for which those of the first rank are used."""
    settings = {"pruning_settings": STRUCTURED, "deployment_settings": HERE}
    data = [x * (1 + 5 * dist.get_rank()) for x in make_images(2)]
    found = clika_compile(
        Convolutions().eval(), tracing_inputs=data, distributed_training_settings=TOGETHER, **settings
    )
    alone = clika_compile(Convolutions().eval(), tracing_inputs=make_images(2), **settings)
    later = clika_compile(Convolutions().eval(), tracing_inputs=data, distributed_training_settings=TOGETHER)
    later.clika_prune(STRUCTURED)
    return {"models": [fingerprint(module.graph) for module in (found, alone, later)]}


def prune_by_dealt_data():
    """Prune on data, with several batches for the importance, during compilation and later."""
    strengths = torch.tensor([9.0, 1.0, 0.1]).reshape(3, 1, 1)
    data = [(x * strengths).roll(number % 2, 1) for number, x in enumerate(make_images(12))]
    found, alone = (
        compile_on_ranks(Convolutions(), own, tracing_inputs=data[:1], pruning_settings=STRUCTURED, **how)
        for own, how in ((deal(data), {}), (data, {"distributed_training_settings": None}))
    )
    later = clika_compile(Convolutions().eval(), tracing_inputs=data[:1], distributed_training_settings=TOGETHER)
    later.clika_prune(STRUCTURED, calibration_inputs=deal(data))
    of_first = clika_compile(Convolutions().eval(), tracing_inputs=data[:1])
    of_first.clika_prune(STRUCTURED, calibration_inputs=data[::2])
    return {
        "plans": [digest_plan(found), digest_plan(alone)],
        "models": [fingerprint(module.graph) for module in (found, alone, later)],
        "of the first": fingerprint(of_first.graph),
    }


def attach_adapters():
    """Attach randomly initialized adapters, with another seed on each rank; while compiling, and later."""
    data, models = make_images(2), [Convolutions(), Convolutions()]
    torch.manual_seed(dist.get_rank())
    found = compile_on_ranks(models[0], deal(data), global_lora_settings=LoraSettings(rank=2))
    later = compile_on_ranks(models[1], deal(data))
    later.clika_attach_lora(LoraSettings(rank=2))
    return {"models": [fingerprint(m.graph) for m in (found, later)], "plans": [digest_plan(m) for m in (found, later)]}


# Failing


def make_data_with_nan(rank, number):
    data = deal(make_images())
    if dist.get_rank() == rank:
        data[number] = torch.full_like(data[number], torch.nan)
    return data


def nan_on_one():
    return {"message": catch_message(lambda: compile_on_ranks(Convolutions(), make_data_with_nan(1, 1)))}


def nan_in_first_batch():
    return {"message": catch_message(lambda: compile_on_ranks(Convolutions(), make_data_with_nan(0, 0)))}


def no_data_on_first():
    own = [] if dist.get_rank() == 0 else make_images(2)
    return {"message": catch_message(lambda: compile_on_ranks(Convolutions(), own, tracing_inputs=make_images(1)))}


def user_error_on_one():
    def yield_then_fail():
        yield make_images(1)[0]
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")

    try:
        compile_on_ranks(Convolutions(), yield_then_fail())
    except (ModelError, OSError) as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": ""}


def error_before_sum():
    """Fail on one rank between its message and the reduction."""
    before = merging.statistics_from_json
    if dist.get_rank() == 1:
        merging.statistics_from_json = None
    try:
        compile_on_ranks(Convolutions(), deal(make_images()))
    except (ModelError, TypeError) as error:
        return {"message": f"{type(error).__name__}: {error}"}
    finally:
        merging.statistics_from_json = before
    return {"message": ""}


def error_on_both():
    data = [x if place < 2 else x * torch.nan for place, x in enumerate(make_images())]
    return {"message": catch_message(lambda: compile_on_ranks(Convolutions(), deal(data)))}


def other_weights():
    model = Convolutions()
    model.head.weight.data += dist.get_rank()
    return {"message": catch_message(lambda: compile_on_ranks(model, deal(make_images())))}


def compile_with_differences(arguments, **of_second):
    """Compile with different arguments on the second rank."""
    arguments = {"calibration_inputs": deal(make_images()), "deployment_settings": HERE, **arguments}
    own = {**arguments, **(of_second if dist.get_rank() else {})}
    return {
        "message": catch_message(
            lambda: clika_compile(Convolutions().eval(), distributed_training_settings=TOGETHER, **own)
        )
    }


def other_targets():
    return compile_with_differences(
        {"quantization_settings": ALL}, deployment_settings=DeploymentSettings_TensorRT_ONNX()
    )


def other_options():
    return compile_with_differences({"quantization_settings": ALL}, batch_norm="live", check_passes=True)


def other_thresholds():
    return compile_with_differences({"quantization_settings": ALL}, quantization_settings=QuantizationSettings())


def float_on_one():
    return compile_with_differences({"quantization_settings": ALL}, quantization_settings=None)


def other_settings_later():
    """Prune, adapt and quantize by other settings on the second rank."""
    rank = dist.get_rank()
    module = clika_compile(
        Convolutions().eval(),
        tracing_inputs=make_images(1),
        deployment_settings=HERE,
        distributed_training_settings=TOGETHER,
    )
    layers = {"head": LayerQuantizationSettings(skip_quantization=True)} if rank else None
    data = {"calibration_inputs": deal(make_images())}
    steps = [
        lambda: module.clika_prune(PruningSettings("structured", None, 0.5 + rank / 4)),
        lambda: module.clika_attach_lora(LoraSettings(rank=2 + rank)),
        lambda: module.clika_initialize_algorithms(ALL, layer_quantization_settings=layers, **data),
        lambda: module.clika_initialize_algorithms(ALL, **({} if rank else data)),
    ]
    return {"message": " / ".join(map(catch_message, steps))}


def arguments_on_one():
    """Pass invalid arguments on the second rank only, during compilation and later."""
    rank = dist.get_rank()
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1), distributed_training_settings=TOGETHER)
    steps = [
        lambda: compile_on_ranks(Convolutions(), None if rank else make_images(1)),
        lambda: compile_on_ranks(Convolutions(), make_images(1), **({"no_option": 1} if rank else {})),
        lambda: module.clika_prune(3 if rank else STRUCTURED),
        lambda: module.clika_attach_lora(4 if rank else None),
        lambda: module.clika_initialize_algorithms(5 if rank else ALL, calibration_inputs=make_images(1)),
        lambda: clika_distribute(6 if rank else module, TOGETHER),
        lambda: module.clika_quantize_to_goal(7 if rank else abs, 0.5, calibration_inputs=make_images(1)),
    ]
    return {"message": [*map(catch_message, steps)]}


def ranges_file():
    file = Path(sys.argv[4]) / "ranges"
    return {
        "message": catch_message(lambda: compile_on_ranks(Convolutions(), deal(make_images()), ranges_file=str(file)))
    }


# Training


def compile_for_training(data, **options):
    """Compile a module for batches of any size."""
    return compile_on_ranks(Convolutions(), data, tracing_inputs=[make_images(1)[0], make_images(1)[0][:2]], **options)


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


def other_plans():
    module = compile_for_training(deal(make_images()), distributed_training_settings=None)
    return {"message": catch_message(lambda: clika_distribute(module, TOGETHER))}


def other_shapes():
    """Shard models of different shapes, so that tensors of one rank do not fit on the other."""
    model = nn.Linear(4, 4 + dist.get_rank()).eval()
    return {
        "message": catch_message(
            lambda: clika_distribute(clika_compile(model, tracing_inputs=[torch.ones(2, 4)]), SHARDED)
        )
    }


def other_norms():
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1))
    module.clika_set_batch_norm("live" if dist.get_rank() else "frozen")
    return {"message": catch_message(lambda: clika_distribute(module, TOGETHER))}


def other_frozen_weights():
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1))
    module.head.weight.requires_grad_(not dist.get_rank())
    return {"message": catch_message(lambda: clika_distribute(module, TOGETHER))}


def shard_on_one():
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1))
    return {"message": catch_message(lambda: clika_distribute(module, SHARDED if dist.get_rank() else TOGETHER))}


def other_steps():
    module = clika_compile(Convolutions().eval(), tracing_inputs=make_images(1))
    return {"message": catch_message(lambda: clika_distribute(module, TOGETHER, steps=3 + dist.get_rank()))}


def replicate_without_settings():
    folder = Path(sys.argv[4]) / f"unasked{dist.get_rank()}"
    compile_for_training(deal(make_images()), distributed_training_settings=None, logs_dir=folder)
    return {"log": read_logs(folder)}


# Ending


def exit_during_data():
    """Let the other rank end while the data is read."""

    def data():
        yield make_images(1)[0]
        if dist.get_rank() == 1:
            os._exit(3)

    return {"message": catch_message(lambda: compile_for_training(data()))}


def hang():
    """Let the other rank be slower than the process group waits."""

    def data():
        yield make_images(1)[0]
        if dist.get_rank() == 1:
            time.sleep(12)

    began = time.monotonic()
    return {"message": catch_message(lambda: compile_for_training(data())), "seconds": time.monotonic() - began}


GROUPS = {
    "quantizing": [
        *(linear_layers, convolutions, int4, by_each_option, small_reservoir, uneven_data, no_data_on_one),
        *(requantize, prune, prune_by_dealt_data, attach_adapters, replicate_without_settings),
    ],
    "failing": [
        *(nan_on_one, nan_in_first_batch, no_data_on_first, user_error_on_one, error_on_both),
        *(error_before_sum,),
        *(other_targets, other_options, other_thresholds, float_on_one, other_settings_later),
        *(arguments_on_one,),
        *(other_norms, other_frozen_weights, shard_on_one),
        *(other_weights, ranges_file, other_plans, other_shapes, other_steps, convolutions),
    ],
    "training": [
        *(train_replicated, train_sharded, switch_modes_sharded, train_sharded_live_norms, shard_other_weights),
        *(shard_without_clika, shard_in_parts, train_idle_weights),
    ],
    "ending": [exit_during_data],
    "hanging": [hang],
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
