"""Scenarios of multi-process tests that quantize, prune and attach adapters."""

import copy
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from calibrated_nets import HERE, Net, make_batches
from log_files import read_logs
from rank_models import (
    ALL,
    LOW_BIT,
    STRUCTURED,
    TOGETHER,
    Convolutions,
    compile_for_training,
    compile_on_ranks,
    deal,
    digest_plan,
    make_images,
)

from clika_ref import LoraSettings, QuantizationSettings, clika_compile
from clika_ref.quantization.calibration import calibrator
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.calibration.range_table import statistics_to_json


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


def replicate_without_settings():
    folder = Path(sys.argv[4]) / f"unasked{dist.get_rank()}"
    compile_for_training(deal(make_images()), distributed_training_settings=None, logs_dir=folder)
    return {"log": read_logs(folder)}


SCENARIOS = [
    *(linear_layers, convolutions, int4, by_each_option, small_reservoir, uneven_data, no_data_on_one),
    *(requantize, prune, prune_by_dealt_data, attach_adapters, replicate_without_settings),
]
