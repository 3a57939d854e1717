"""Per-channel means of a layer's output."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.ir import Node


def reshape_to_channels(node: Node, channels: Tensor, result: Tensor) -> Tensor:
    """Reshape ``float32[channels]`` so that it broadcasts to the output of a layer."""
    shape = [1] * result.ndim
    shape[node.op.trait.channel or 0] = -1
    return channels.reshape(shape)


MAX_MEAN_SAMPLES = 16
"""Maximum number of parts that an output is split into; its first dim may be that of positions, which are many."""


def channel_means(node: Node, result: Tensor) -> Tensor:
    """Return the mean of each channel in each sample, ``float32[samples, channels]``.

    An output without a batch dim is one sample. More than `MAX_MEAN_SAMPLES` samples are averaged in groups of
    neighbors.
    """
    by_channel = result.movedim(node.op.trait.channel or 0, -1)
    means = by_channel.reshape(result.shape[0] if result.ndim > 1 else 1, -1, by_channel.shape[-1]).mean(1)
    if len(means) <= MAX_MEAN_SAMPLES:
        return means
    return torch.stack([part.mean(0) for part in means.tensor_split(MAX_MEAN_SAMPLES)])
