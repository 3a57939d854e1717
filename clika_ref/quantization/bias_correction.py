"""Bias correction: what rounding shifts of each output channel on average, taken back by the bias of the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.quantization.channels import along_channels, channel_means
from clika_ref.quantization.quantizing import Plan, quantize_graph
from clika_ref.quantization.running import run


@dataclass
class BiasShifts:
    """What rounding shifts of each layer with a bias, sample by sample, as far as it was looked at.

    Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.2,
    with the means of data.
    """

    graph: Graph
    plan: Plan
    """Which corrects no bias yet."""
    operators: Mapping[str, Operator]
    of: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """``float32[samples, channels]`` of each batch, by the name of the layer."""

    @cached_property
    def _quantized(self) -> Graph:
        twin = self.graph.clone()
        quantize_graph(twin, self.plan, self.operators)
        return twin

    @torch.no_grad()
    def add(self, inputs: Sequence[Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Look at a batch: one run in integers in which each layer is corrected before the next reads it.

        So what is found of a layer includes what is left of the errors of those before.

        Args:
            inputs: the batch.
            wanted: the `channel_means` of it in float, by the names of the layers.
        """

        def correct(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if node.name not in self.plan.weights or node.op.trait.bias is None:
                return None
            shifts = wanted[node.name] - channel_means(node, results[0])
            self.of.setdefault(node.name, []).append(shifts)
            return (results[0] + along_channels(node, _shrunk(shifts), results[0]),)

        run(self._quantized, inputs, correct)

    def corrections(self) -> dict[str, Tensor]:
        """Return what to add to the bias of each layer, ``float32[channels]`` by its name.

        Each shift is shrunk by how far samples disagree on it: what is chance is not taken back.
        """
        return {name: _shrunk(torch.cat(shifts)) for name, shifts in self.of.items()}


def correction(node: Node, wanted: Tensor, found: Tensor) -> Tensor:
    """Return what to add to a result of one layer alone, in a shape that broadcasts to it."""
    return along_channels(node, _shrunk(channel_means(node, wanted) - channel_means(node, found)), found)


def _shrunk(shifts: Tensor) -> Tensor:
    """Return the mean of ``float32[samples, channels]``, the smaller the less it stands out from its own error.

    What chance adds to the square of a mean is known, and taken off: shifts that are no larger become 0.
    """
    mean, samples = shifts.mean(0), len(shifts)
    if samples < 2:
        return mean
    chance = shifts.var(0) / samples
    return mean * (1 - chance / mean.square().clamp(min=torch.finfo(mean.dtype).tiny)).clamp(min=0)
