"""What a layer returned, channel by channel."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.ir import Node


def along_channels(node: Node, channels: Tensor, result: Tensor) -> Tensor:
    """Return ``float32[channels]`` in a shape that broadcasts to a result."""
    sides = [1] * result.ndim
    sides[node.op.trait.channel or 0] = -1
    return channels.reshape(sides)


MOST_SAMPLES = 16
"""Into as many parts a result is cut at most: its first side may be that of positions, of which there are many."""


def channel_means(node: Node, result: Tensor) -> Tensor:
    """Return the mean of each channel in each sample, ``float32[samples, channels]``; one sample where none are.

    Where there are more than `MOST_SAMPLES`, neighbours make one.
    """
    by_channel = result.movedim(node.op.trait.channel or 0, -1)
    means = by_channel.reshape(result.shape[0] if result.ndim > 1 else 1, -1, by_channel.shape[-1]).mean(1)
    if len(means) <= MOST_SAMPLES:
        return means
    return torch.stack([part.mean(0) for part in means.tensor_split(MOST_SAMPLES)])
