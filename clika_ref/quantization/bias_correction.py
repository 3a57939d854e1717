"""Bias correction: what rounding shifts of each output channel on average, taken back by the bias of the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.quantization.quantizing import Plan, quantize_graph


@torch.no_grad()
def bias_corrections(
    graph: Graph, plan: Plan, operators: Mapping[str, Operator], inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return what to add to the bias of each layer of a plan, ``float32[channels]`` by the name of the layer.

    One run in integers in which each layer is corrected before the next reads it, so that errors of what came before
    are corrected too. Each shift is shrunk by how far samples disagree on it: what is chance is not taken back.

    Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.2,
    with the means of data.
    """
    wanted: dict[str, Tensor] = {}

    def note(node: Node, results: tuple[Tensor, ...]) -> None:
        if node.name in plan.weights and node.op.trait.bias is not None:
            wanted[node.name] = channel_means(node, results[0])

    interpret(graph, inputs, note)
    found: dict[str, Tensor] = {}

    def correct(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if node.name not in wanted:
            return None
        found[node.name] = _shrunk(wanted[node.name] - channel_means(node, results[0]))
        return (results[0] + along_channels(node, found[node.name], results[0]),)

    twin = graph.clone()
    quantize_graph(twin, plan, operators)
    interpret(twin, inputs, correct)
    return found


def correction(node: Node, wanted: Tensor, found: Tensor) -> Tensor:
    """Return what to add to a result of one layer alone, in a shape that broadcasts to it."""
    return along_channels(node, _shrunk(channel_means(node, wanted) - channel_means(node, found)), found)


def along_channels(node: Node, channels: Tensor, result: Tensor) -> Tensor:
    """Return ``float32[channels]`` in a shape that broadcasts to a result."""
    sides = [1] * result.ndim
    sides[node.op.trait.channel or 0] = -1
    return channels.reshape(sides)


def channel_means(node: Node, result: Tensor) -> Tensor:
    """Return the mean of each channel in each sample, ``float32[samples, channels]``; one sample where none are."""
    by_channel = result.movedim(node.op.trait.channel or 0, -1)
    return by_channel.reshape(result.shape[0] if result.ndim > 1 else 1, -1, by_channel.shape[-1]).mean(1)


def _shrunk(shifts: Tensor) -> Tensor:
    """Return the mean of ``float32[samples, channels]``, the smaller the less it stands out from its own error.

    What chance adds to the square of a mean is known, and taken off: shifts that are no larger become 0.
    """
    mean, samples = shifts.mean(0), len(shifts)
    if samples < 2:
        return mean
    chance = shifts.var(0) / samples
    return mean * (1 - chance / mean.square().clamp(min=torch.finfo(mean.dtype).tiny)).clamp(min=0)
