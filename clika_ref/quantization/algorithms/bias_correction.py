"""Bias correction: remove the mean error that quantization adds to each output channel, with the bias of the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.fused_pairs import clone_quantized
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import channel_means, reshape_along_dim


@dataclass
class BiasShifts:
    """Mean shift that quantization causes in the outputs of each layer with a bias, sample by sample.

    Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.2,
    with means measured on data.
    """

    graph: Graph
    """The lowered graph, in float."""
    plan: Plan
    """The plan to correct; it has no corrections yet."""
    operators: Mapping[str, Operator]
    """The operators of the registry."""
    of: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """``float32[samples, channels]`` for each batch, by layer name."""

    @cached_property
    def _quantized(self) -> Graph:
        return clone_quantized(self.graph, self.plan, self.operators)

    @torch.no_grad()
    def add(self, inputs: Sequence[Tensor], expected: Mapping[str, Tensor]) -> None:
        """Measure the shifts on one batch, correcting each layer before the next one reads its output.

        The shifts of a layer therefore include the error that earlier corrections leave.

        Args:
            inputs: the batch, one tensor for each input of the graph.
            expected: the `channel_means` of the float graph on this batch, by layer name.
        """

        def correct(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if node.name not in self.plan.weights or node.op.trait.bias is None:
                return None
            shifts = expected[node.name] - channel_means(node, results[0])
            self.of.setdefault(node.name, []).append(shifts)
            return (results[0] + _reshape_to_channels(node, _shrink_mean(shifts), results[0]),)

        run_graph(self._quantized, inputs, correct)

    def copy(self) -> BiasShifts:
        """Return a copy that further batches may be added to; it clones the quantized graph again when it needs it."""
        return BiasShifts(self.graph, self.plan, self.operators, {name: [*shifts] for name, shifts in self.of.items()})

    def corrections(self) -> dict[str, Tensor]:
        """Return the correction of each layer's bias, ``float32[channels]``, by layer name.

        Each shift is shrunk by its variance across samples, so that sampling noise is not corrected.
        """
        return {name: _shrink_mean(torch.cat(shifts)) for name, shifts in self.of.items()}


def compute_correction(node: Node, expected: Tensor, found: Tensor) -> Tensor:
    """Return the correction for the output of a single layer, in a shape that broadcasts to it."""
    return _reshape_to_channels(node, _shrink_mean(channel_means(node, expected) - channel_means(node, found)), found)


def _reshape_to_channels(node: Node, channels: Tensor, result: Tensor) -> Tensor:
    return reshape_along_dim(channels, node.op.trait.channel or 0, result.ndim)


def _shrink_mean(shifts: Tensor) -> Tensor:
    """Return the mean of ``float32[samples, channels]``, shrunk towards 0 by its standard error.

    The expected contribution of noise is subtracted from the squared mean. A mean that is no larger than the noise
    becomes 0.
    """
    mean, samples = shifts.mean(0), len(shifts)
    if samples < 2:
        return mean
    chance = shifts.var(0) / samples
    return mean * (1 - chance / mean.square().clamp(min=torch.finfo(mean.dtype).tiny)).clamp(min=0)
