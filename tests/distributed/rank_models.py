"""Shared by the scenarios of multi-process tests: models, data for each rank, and their compilation on all ranks."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from calibrated_nets import HERE
from torch import nn

from clika_ref import DistributedTrainingSettings, ModelError, PruningSettings, QuantizationSettings, clika_compile
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


def catch_message(work):
    """Return the error message of a failing scenario."""
    try:
        work()
    except (ModelError, ValueError) as error:
        return str(error)
    return ""


def compile_for_training(data, **options):
    """Compile a module for batches of any size."""
    return compile_on_ranks(Convolutions(), data, tracing_inputs=[make_images(1)[0], make_images(1)[0][:2]], **options)
