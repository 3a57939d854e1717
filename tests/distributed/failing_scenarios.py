"""Scenarios of multi-process tests that fail on a rank, or whose ranks differ."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from calibrated_nets import HERE
from quantizing_scenarios import convolutions
from rank_models import (
    ALL,
    SHARDED,
    STRUCTURED,
    TOGETHER,
    Convolutions,
    catch_message,
    compile_for_training,
    compile_on_ranks,
    deal,
    make_images,
)
from torch import nn

from clika_ref import (
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    LoraSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
    clika_distribute,
)
from clika_ref.distributed import merging


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


SCENARIOS = [
    *(nan_on_one, nan_in_first_batch, no_data_on_first, user_error_on_one, error_on_both),
    *(error_before_sum,),
    *(other_targets, other_options, other_thresholds, float_on_one, other_settings_later),
    *(arguments_on_one,),
    *(other_norms, other_frozen_weights, shard_on_one),
    *(other_weights, ranges_file, other_plans, other_shapes, other_steps, convolutions),
]
