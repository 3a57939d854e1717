"""Thirty small networks of varied kinds, with the inputs to trace and calibrate them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from releasing.baseline import image_networks as images
from releasing.baseline import sequence_networks as sequences

TRACED_BATCHES = (2, 3)
"""Batch sizes of the two tracing calls: they differ, so the batch dimension is dynamic."""

CALIBRATION_CALLS = 4
CALIBRATION_BATCH = 8


class Sampler:
    """Draws random tensors from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw_floats(self, *shape: int) -> torch.Tensor:
        """Return normally distributed float32 numbers."""
        return torch.randn(shape, generator=self.generator)

    def draw_integers(self, below: int, *shape: int) -> torch.Tensor:
        """Return int64 numbers from 0 to ``below - 1``."""
        return torch.randint(below, shape, generator=self.generator)

    def draw_booleans(self, *shape: int) -> torch.Tensor:
        """Return booleans, three quarters of them true."""
        return torch.rand(shape, generator=self.generator) < 0.75


Call = Callable[[Sampler, int, int], Any]
"""Makes the input of one call from a sampler, a batch size and a second dimension."""


@dataclass(frozen=True)
class Network:
    """A model and its inputs."""

    build: Callable[[], nn.Module]
    call: Call
    lengths: tuple[int, int] = (8, 8)
    """The second dimension in the two tracing calls. Two different lengths make it dynamic."""
    batches: tuple[int, int] = TRACED_BATCHES
    training_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`ClikaCompileOptions` for the variant that is trained."""

    @property
    def seed(self) -> int:
        """Seed of the weights and inputs: differs from network to network, is equal in every process."""
        return zlib.crc32(self.build.__name__.encode())

    def make(self) -> nn.Module:
        """Return the model in eval mode. Equal calls return equal weights."""
        torch.manual_seed(self.seed)
        model = self.build().eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the base of all three
                _randomize_statistics(module)
        return model

    def tracing_inputs(self) -> list[Any]:
        """Return two calls, which differ in each dynamic dimension."""
        sampler = Sampler(self.seed)
        return [self.call(sampler, n, m) for n, m in zip(self.batches, self.lengths, strict=True)]

    def calibration_inputs(self) -> list[Any]:
        """Return the calls to calibrate with."""
        sampler = Sampler(self.seed + 1)
        batch = self.batches[0] if self.batches[0] == self.batches[1] else CALIBRATION_BATCH
        return [self.call(sampler, batch, self.lengths[i % 2]) for i in range(CALIBRATION_CALLS)]


def _randomize_statistics(norm: Any) -> None:
    """Give a batch norm statistics and weights other than 0 and 1, which folding would not show."""
    with torch.no_grad():
        norm.running_mean.normal_(0, 0.2)
        norm.running_var.uniform_(0.5, 1.5)
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0, 0.2)


def _image(channels: int, size: int) -> Call:
    """Return a maker of ``x[n, channels, size, size]``."""
    return lambda sampler, n, _: sampler.draw_floats(n, channels, size, size)


def _sequence(features: int) -> Call:
    """Return a maker of ``x[n, m, features]``."""
    return lambda sampler, n, m: sampler.draw_floats(n, m, features)


def _tokens(count: int) -> Call:
    """Return a maker of ``tokens[n, m]``."""
    return lambda sampler, n, m: sampler.draw_integers(count, n, m)


NETWORKS: Mapping[str, Network] = {
    "mlp": Network(sequences.Perceptron, lambda sampler, n, _: sampler.draw_floats(n, 32)),
    "mlp-static": Network(sequences.Normed, lambda sampler, n, _: sampler.draw_floats(n, 32), batches=(2, 2)),
    "conv-batch-norm": Network(images.ConvBatchNorm, _image(3, 8)),
    "residual": Network(images.Residual, _image(3, 8), training_options={"batch_norm": "live"}),
    "depthwise": Network(images.Depthwise, _image(3, 8)),
    "grouped": Network(images.Grouped, _image(4, 8)),
    "transposed": Network(images.Transposed, _image(3, 8)),
    "pooling": Network(images.Pooling, _image(3, 12)),
    "split-concat": Network(images.SplitConcat, _image(4, 8)),
    "dense": Network(images.Dense, _image(3, 8), training_options={"batch_norm": "live"}),
    "unet": Network(images.UNet, _image(3, 8)),
    "group-norm": Network(images.GroupNormed, _image(3, 8)),
    "convnext": Network(images.ConvNext, _image(3, 8)),
    "pixel-shuffle": Network(
        images.PixelShuffled, lambda sampler, n, m: sampler.draw_floats(n, 3, m, m + 2), lengths=(6, 9)
    ),
    "conv1d": Network(images.Temporal, lambda sampler, n, m: sampler.draw_floats(n, 4, m), lengths=(12, 17)),
    "conv3d": Network(images.Volumetric, lambda sampler, n, _: sampler.draw_floats(n, 2, 4, 8, 8)),
    "vision-transformer": Network(images.VisionTransformer, _image(3, 8)),
    "mixer": Network(sequences.Mixer, _sequence(16)),
    "attention": Network(sequences.Attention, _sequence(64), lengths=(6, 9)),
    "encoder": Network(sequences.Encoder, _sequence(16), lengths=(6, 9)),
    "masked-attention": Network(
        sequences.MaskedAttention,
        lambda sampler, n, m: (sampler.draw_floats(n, m, 16), sampler.draw_booleans(n, m)),
        lengths=(6, 9),
    ),
    "embedding": Network(sequences.Embedded, _tokens(20), lengths=(6, 9)),
    "tied": Network(sequences.Tied, _tokens(24), lengths=(6, 9)),
    "lstm": Network(sequences.Lstm, _sequence(12), lengths=(6, 9)),
    "gru": Network(sequences.Gru, _sequence(12)),
    "two-inputs": Network(
        sequences.TwoInputs,
        lambda sampler, n, _: {"image": sampler.draw_floats(n, 3, 8, 8), "features": sampler.draw_floats(n, 8)},
    ),
    "dict-outputs": Network(images.DictOutputs, _image(3, 8)),
    "gated": Network(sequences.Gated, _sequence(16), lengths=(6, 9)),
    "shared-layer": Network(sequences.SharedLayer, lambda sampler, n, _: sampler.draw_floats(n, 16)),
    "indexing": Network(sequences.Indexing, _sequence(16), lengths=(6, 9)),
}

QUICK_NETWORKS = ("mlp", "residual", "transposed", "attention", "tied", "lstm")
"""The networks that a quick comparison takes."""
