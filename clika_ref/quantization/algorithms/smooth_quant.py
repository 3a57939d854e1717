"""SmoothQuant and cross-layer equalization: divide channels much larger than others before they share one scale.

The weights that read these channels are multiplied by the same factors; a weight has a scale for each output channel,
so its error grows less. The float result does not change. The input of any linear layer can be divided, by a separate
node if the factors cannot be multiplied into constants before it. Between convolutions, factors are used only if the
preceding layer can be divided by them.

Sources: Xiao et al., SmoothQuant (2023); Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction (2019), section 4.1, with activations instead of weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.quantization.calibration.observers import Range
from clika_ref.quantization.graph_runs import visit_activations
from clika_ref.quantization.qdq.channel_scales import (
    ScalableChannels,
    find_scalable_channels,
    scale_input_channels,
    split_weight_groups,
)
from clika_ref.quantization.qdq.layer_weights import groups_of, reshape_along_dim, run_with_weight
from clika_ref.quantization.qdq.qparams import compute_qparams, compute_weight_scales

SMOOTHING_STRENGTHS = (0.5, 0.65, 0.8)
"""How far the ranges of channels are moved from activations into weights: 0 not at all, 1 wholly."""

FULL_STRENGTH = 1.0
"""Strength that is tried as well if each channel has its own weights, which absorb any factor."""

MAX_EVALUATION_ROWS = 128
"""Rows of the input of a layer with a matrix that strengths are compared on; for other layers, one sample."""

MAX_ERROR_SHARE_WITH_NODE = 0.5
"""Largest share of the error that a factor may leave if a separate node must divide, which costs time."""

MAX_ERROR_SHARE_ABSORBED = 0.9
"""The same for factors that constants absorb at no cost; a small gain on one batch may not hold on the next."""

MIN_ELEMENTS_PER_CHANNEL = 64
"""Minimum number of elements of each channel in a batch: with fewer, factors overfit and degrade some outputs.

A trained network of three linear layers lost 4 dB with factors from a batch of 4, or 16, and none with those from 64.
"""

MAX_FACTOR = 1e2
"""Largest factor; the smallest is 1. None enlarges: a channel that is small on one batch may be large on the next."""


class FactorEvaluator(Protocol):
    """Evaluates factors of several strengths for the channels of one value."""

    def candidates(self) -> Iterable[Tensor]:
        """Return factors to try, ``float32[channels]``, none of them below 1."""
        ...

    def error(self, factor: Tensor) -> float:
        """Return the output error of all layers that read the value, if it is divided by a factor."""
        ...


@dataclass(frozen=True)
class SmoothingOptions:
    """The factors to search for, and the largest share of the error that they may leave."""

    with_node_share: float | None = MAX_ERROR_SHARE_WITH_NODE
    """For factors that need a separate node; None skips them."""
    absorbed_share: float | None = MAX_ERROR_SHARE_ABSORBED
    """For factors of layers with a matrix that a preceding node absorbs; None skips them."""
    equalization_share: float | None = MAX_ERROR_SHARE_ABSORBED
    """For factors between convolutions; None skips them."""
    min_elements: int = MIN_ELEMENTS_PER_CHANNEL
    """Minimum number of elements of each channel."""

    def of(self, channels: ScalableChannels) -> float | None:
        """Return the largest share of the error that the factors of a value may leave; None skips it."""
        if channels.source is None:
            return self.with_node_share
        return self.absorbed_share if channels.axis == -1 else self.equalization_share


@torch.no_grad()
def search_smoothing_factors(
    graph: Graph,
    kinds: Collection[str],
    inputs: Sequence[Tensor],
    try_on: Callable[[ScalableChannels, Tensor], FactorEvaluator],
    options: SmoothingOptions | None = None,
) -> dict[str, Tensor]:
    """Return the factors to divide the inputs of layers by, ``float32[channels]`` by value name.

    Args:
        graph: lowered.
        kinds: operators with layers that the target quantizes.
        inputs: a batch, to evaluate each strength on.
        try_on: returns the evaluation of a value's channels, given its tensor.
        options: the factors to search for.
    """
    options = options or SmoothingOptions()
    expected = _find_candidates(graph, kinds, options)
    factors: dict[str, Tensor] = {}

    def evaluate_value(value: Value, x: Tensor) -> None:
        if value not in expected or not x.numel():
            return
        channels, gain = expected[value]
        if x.numel() >= options.min_elements * x.shape[channels.axis] and bool(x.isfinite().all()):
            best = _best_factor(try_on(channels, x), x.new_ones(x.shape[channels.axis]), gain)
            if best is not None:
                factors[value.name] = best

    visit_activations(graph, inputs, evaluate_value)
    return factors


def _find_candidates(
    graph: Graph, kinds: Collection[str], options: SmoothingOptions
) -> dict[Value, tuple[ScalableChannels, float]]:
    found: dict[Value, tuple[ScalableChannels, float]] = {}
    for value in _graph_values(graph):
        channels = find_scalable_channels(graph, value)
        if channels is not None and all(node.op_type in kinds for node in channels.layers):
            gain = options.of(channels)
            if gain is not None:
                found[value] = channels, gain
    return found


def _best_factor(strengths: FactorEvaluator, none: Tensor, gain: float) -> Tensor | None:
    """Return the factor with the least error; None if none is sufficiently better than ones."""
    best, lowest = None, gain * strengths.error(none)
    for factor in strengths.candidates():
        if (found := strengths.error(factor)) < lowest:
            best, lowest = factor, found
    return best


def apply_smoothing(graph: Graph, factors: Mapping[str, Tensor], operators: Mapping[str, Operator]) -> None:
    """Divide values of a graph by their factors, and multiply the weights that read them."""
    nodes = list(graph.nodes)
    after = dict(itertools.pairwise([*nodes, None]))
    for value in _graph_values(graph):
        channels = find_scalable_channels(graph, value) if value.name in factors else None
        if channels is not None:
            before = nodes[0] if value.producer is None else after[value.producer]
            channels.divide(graph, factors[value.name], Builder(graph, operators, before))


def _graph_values(graph: Graph) -> list[Value]:
    return [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]


class QuantizedInputEvaluator:
    """Evaluates factors for layers with quantized inputs and weights.

    Args:
        channels: those of one activation, with the layers that read it.
        x: the activation, with the channels along one of its dims; any shape.
        scheme: the quantization scheme of the target.
    """

    def __init__(self, channels: ScalableChannels, x: Tensor, scheme: QuantizationScheme) -> None:
        self.channels, self.scheme = channels, scheme
        rows = channels.rows(x)
        self.lows, self.highs = rows.amin(0), rows.amax(0)
        self.x = rows[:: max(len(rows) // MAX_EVALUATION_ROWS, 1)] if channels.has_only_matrices else x[:1]
        self.layer_weights = channels.layer_weights()
        self.expected = [run_with_weight(*pair, self.x) for pair in self.layer_weights]

    def candidates(self) -> Iterator[Tensor]:
        """Yield factors that equalize the channels of the input, ``float32[channels]``, as far as weights allow."""
        reach = torch.maximum(-self.lows, self.highs)
        inward = torch.stack([_max_input_weights(*pair) for pair in self.layer_weights]).amax(0)
        has_own = all(groups_of(node) == len(reach) for node in self.channels.layers)
        for strength in (*SMOOTHING_STRENGTHS, FULL_STRENGTH) if has_own else SMOOTHING_STRENGTHS:
            yield compute_factor(reach, inward, strength)

    def error(self, factor: Tensor) -> float:
        """Return the squared error of the outputs, summed over all layers, for a factor ``float32[channels]``."""
        kind = self.scheme.activations
        chosen = compute_qparams(Range(float((self.lows / factor).min()), float((self.highs / factor).max())), kind)
        divided = self.x / reshape_along_dim(factor, self.channels.axis, self.x.ndim)
        read = _fake_quantize(divided, self.x.new_tensor(chosen.scale), chosen.zero_point, kind)
        squared_error = 0.0
        for (node, weight), expected in zip(self.layer_weights, self.expected, strict=True):
            large = scale_input_channels(weight, factor, groups=groups_of(node))
            scales = reshape_along_dim(compute_weight_scales(large, 0, self.scheme.weights), 0, weight.ndim)
            found = run_with_weight(node, _fake_quantize(large, scales, 0, self.scheme.weights), read)
            squared_error += float((found - expected).square().sum())
        return squared_error


def _max_input_weights(node: Node, weight: Tensor) -> Tensor:
    """Return the largest weight of each input channel, ``float32[channels]``."""
    parts = split_weight_groups(weight.abs(), groups_of(node))
    return parts.amax((1, *range(3, parts.ndim))).flatten()


def compute_factor(reach: Tensor, inward: Tensor, strength: float) -> Tensor:
    """Return ``reach ** strength / inward ** (1 - strength)`` over its median, ``float32[channels]`` from 1."""
    tiny = torch.finfo(torch.float32).tiny
    factor = reach.clamp(min=tiny).log() * strength - inward.clamp(min=tiny).log() * (1 - strength)
    return (factor - factor.median()).exp().clamp(1, MAX_FACTOR).float()


def _fake_quantize(x: Tensor, scale: Tensor, zero_point: int, kind: QuantizedType) -> Tensor:
    return ((x / scale).round() + zero_point).clamp(kind.low, kind.high).sub(zero_point) * scale
