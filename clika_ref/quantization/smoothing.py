"""Smoothing and equalization: channels much larger than others are divided before they are rounded by one scale.

The weights behind are multiplied instead, which have a scale for each output channel and so room to spare. Nothing
changes in float. What layers with a matrix read is smoothed wherever it comes from, by a node that divides where
nothing before it can take that up; between convolutions, only what the one before takes up is equalized.

Sources: Xiao et al., SmoothQuant (2023); Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction (2019), section 4.1, by what values held instead of by weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.quantization.factors import Channels, by_input, channels_of, times
from clika_ref.quantization.layer_weights import groups_of, with_weight
from clika_ref.quantization.observers import Range
from clika_ref.quantization.running import run
from clika_ref.quantization.scales import scale_of, weight_scales
from clika_ref.quantization_scheme import Integers, QuantizationScheme

STRENGTHS = (0.5, 0.65, 0.8)
"""How far the ranges of channels are moved from what is read into weights: 0 not at all, 1 wholly."""

WHOLLY = 1.0
"""The strength that is tried as well where each channel has weights of its own, which take up any factor."""

ROWS = 128
"""Of what a layer with a matrix reads, on which strengths are compared; of others, one sample."""

GAIN = 0.5
"""A node that divides costs time: it must leave this share of the error at most."""

FREE_GAIN = 0.9
"""What is taken up before costs none; but what helps on one batch a little may not on the next."""

FEWEST = 64
"""Elements of each channel that a batch must hold: of fewer, any factors fit some by chance, and spoil others.

A trained network of three linear layers lost 4 dB by factors from a batch of 4, or 16, and none by those from 64.
"""

MOST = 1e2
"""Factors lie between 1 and this. None enlarges: what is small on one batch may be large on the next."""


class Strengths(Protocol):
    """Tries factors of several strengths for the channels of one value."""

    def candidates(self) -> Iterable[Tensor]:
        """Return factors to try, ``float32[channels]``, none of them below 1."""
        ...

    def error(self, factor: Tensor) -> float:
        """Return what is missed of the results of all layers that read the value, were it divided by a factor."""
        ...


@dataclass(frozen=True)
class Wishes:
    """Which factors are looked for, and the share of an error that they must leave at most."""

    of_matrices: float | None = GAIN
    """Where a node must divide; None looks for none."""
    taken_up: float | None = FREE_GAIN
    """The same where a layer with a matrix reads what something before takes up."""
    between_others: float | None = FREE_GAIN
    """The same between convolutions."""
    fewest: int = FEWEST
    """Elements of each channel below which none are looked for."""

    def of(self, channels: Channels) -> float | None:
        """Return what is asked of the factors of a value; None where they are not wanted."""
        if channels.source is None:
            return self.of_matrices
        return self.taken_up if channels.side == -1 else self.between_others


@torch.no_grad()
def smoothing_factors(
    graph: Graph,
    kinds: Collection[str],
    inputs: Sequence[Tensor],
    try_on: Callable[[Channels, Tensor], Strengths],
    wishes: Wishes | None = None,
) -> dict[str, Tensor]:
    """Return what to divide values by that layers read, ``float32[channels]``, by the name of the value.

    Args:
        graph: as it is going to be written.
        kinds: operators whose layers the target quantizes.
        inputs: a batch, on which each strength is tried.
        try_on: tries the channels of a value, given what it held.
        wishes: which are looked for.
    """
    wishes = wishes or Wishes()
    wanted = _wanted(graph, kinds, wishes)
    factors: dict[str, Tensor] = {}

    def look(value: Value, x: Tensor) -> None:
        if value not in wanted or not x.numel():
            return
        channels, gain = wanted[value]
        if x.numel() >= wishes.fewest * x.shape[channels.side] and bool(x.isfinite().all()):
            best = _best(try_on(channels, x), x.new_ones(x.shape[channels.side]), gain)
            if best is not None:
                factors[value.name] = best

    def observe(node: Node, results: tuple[Tensor, ...]) -> None:
        for value, result in zip(node.outputs, results, strict=True):
            look(value, result)

    for value, x in zip(graph.inputs, inputs, strict=True):
        look(value, x)
    run(graph, inputs, observe)
    return factors


def _wanted(graph: Graph, kinds: Collection[str], wishes: Wishes) -> dict[Value, tuple[Channels, float]]:
    found: dict[Value, tuple[Channels, float]] = {}
    for value in _values(graph):
        channels = channels_of(graph, value)
        if channels is not None and all(node.kind in kinds for node in channels.layers):
            gain = wishes.of(channels)
            if gain is not None:
                found[value] = channels, gain
    return found


def _best(strengths: Strengths, none: Tensor, gain: float) -> Tensor | None:
    """Return the factor that leaves the least error, None where none is so much better than that of ones."""
    best, least = None, gain * strengths.error(none)
    for factor in strengths.candidates():
        if (found := strengths.error(factor)) < least:
            best, least = factor, found
    return best


def smooth(graph: Graph, factors: Mapping[str, Tensor], operators: Mapping[str, Operator]) -> None:
    """Put factors into a graph, and their inverses into the weights behind."""
    nodes = list(graph.nodes)
    after = dict(zip(nodes, [*nodes[1:], None], strict=True))
    for value in _values(graph):
        channels = channels_of(graph, value) if value.name in factors else None
        if channels is not None:
            before = nodes[0] if value.producer is None else after[value.producer]
            channels.divide(graph, factors[value.name], Builder(graph, operators, before))


def _values(graph: Graph) -> list[Value]:
    return [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]


class QuantizedReading:
    """Tries factors for layers that read integers, with weights in integers."""

    def __init__(self, channels: Channels, x: Tensor, scheme: QuantizationScheme) -> None:
        self.channels, self.scheme = channels, scheme
        rows = channels.rows(x)
        self.lows, self.highs = rows.amin(0), rows.amax(0)
        self.x = rows[:: max(len(rows) // ROWS, 1)] if channels.is_of_matrices else x[:1]
        self.weighted = channels.weighted()
        self.wanted = [with_weight(*pair, self.x) for pair in self.weighted]

    def candidates(self) -> Iterator[Tensor]:
        """Return factors that even out what channels hold, and the more of them the less weights suffer."""
        reach = torch.maximum(-self.lows, self.highs)
        inward = torch.stack([_inward(*pair) for pair in self.weighted]).amax(0)
        has_own = all(groups_of(node) == len(reach) for node in self.channels.layers)
        for strength in (*STRENGTHS, WHOLLY) if has_own else STRENGTHS:
            yield factor_of(reach, inward, strength)

    def error(self, factor: Tensor) -> float:
        """Return the squares of what integers miss of the results, summed over all layers."""
        kind = self.scheme.activations
        chosen = scale_of(Range(float((self.lows / factor).min()), float((self.highs / factor).max())), kind)
        sides = [1] * self.x.ndim
        sides[self.channels.side] = -1
        read = _rounded(self.x / factor.reshape(sides), self.x.new_tensor(chosen.scale), chosen.zero_point, kind)
        missed = 0.0
        for (node, weight), wanted in zip(self.weighted, self.wanted, strict=True):
            large = times(weight, factor, groups=groups_of(node))
            scales = weight_scales(large, 0, self.scheme.weights).reshape(-1, *[1] * (weight.ndim - 1))
            found = with_weight(node, _rounded(large, scales, 0, self.scheme.weights), read)
            missed += float((found - wanted).square().sum())
        return missed


def _inward(node: Node, weight: Tensor) -> Tensor:
    """Return the largest of the weights that each channel is multiplied with, ``float32[channels]``."""
    parts = by_input(weight.abs(), groups_of(node))
    return parts.amax((1, *range(3, parts.ndim))).flatten()


def factor_of(reach: Tensor, inward: Tensor, strength: float) -> Tensor:
    """Return ``reach ** strength / inward ** (1 - strength)`` by its median, ``float32[channels]`` from 1 on."""
    tiny = torch.finfo(torch.float32).tiny
    factor = reach.clamp(min=tiny).log() * strength - inward.clamp(min=tiny).log() * (1 - strength)
    return (factor - factor.median()).exp().clamp(1, MOST).float()


def _rounded(x: Tensor, scale: Tensor, zero_point: int, kind: Integers) -> Tensor:
    return ((x / scale).round() + zero_point).clamp(kind.low, kind.high).sub(zero_point) * scale
