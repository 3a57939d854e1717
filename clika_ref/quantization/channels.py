"""What a layer returned, channel by channel."""

from __future__ import annotations

from torch import Tensor

from clika_ref.core.ir import Node


def along_channels(node: Node, channels: Tensor, result: Tensor) -> Tensor:
    """Return ``float32[channels]`` in a shape that broadcasts to a result."""
    sides = [1] * result.ndim
    sides[node.op.trait.channel or 0] = -1
    return channels.reshape(sides)


def channel_means(node: Node, result: Tensor) -> Tensor:
    """Return the mean of each channel in each sample, ``float32[samples, channels]``; one sample where none are."""
    by_channel = result.movedim(node.op.trait.channel or 0, -1)
    return by_channel.reshape(result.shape[0] if result.ndim > 1 else 1, -1, by_channel.shape[-1]).mean(1)
