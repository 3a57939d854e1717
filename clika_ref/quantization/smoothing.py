"""Smoothing: channels that are much larger than others are made smaller before they are quantized by one scale.

What linear layers read is multiplied by a factor for each channel, and the weights behind it by its inverse, which have
a scale for each output channel and so room to spare. Nothing changes in float.

Source: Xiao et al., SmoothQuant (2023), with a factor in the graph where no layer before it can take it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.core.operators import Operator
from clika_ref.quantization.observers import Range
from clika_ref.quantization.quantizing import Plan, quantize_graph
from clika_ref.quantization.scales import scale_of, weight_scales
from clika_ref.quantization_scheme import Integers, QuantizationScheme

STRENGTHS = (0.5, 0.65, 0.8)
"""How far the ranges of channels are moved from what is read into weights: 0 not at all, 1 wholly."""

ROWS = 128
"""Of what a layer reads, on which strengths are compared."""

GAIN = 0.5
"""A factor costs time: it must leave this share of the error at most."""

MOST = 1e2
"""Factors lie between 1 and this. None enlarges: what is small on one batch may be large on the next."""


@torch.no_grad()
def smoothing_factors(
    graph: Graph, scheme: QuantizationScheme, inputs: Sequence[Tensor], *, gain: float = GAIN
) -> dict[str, Tensor]:
    """Return what to divide values by that linear layers read, ``float32[channels]``, by the name of the value.

    Args:
        graph: as it is going to be written.
        scheme: what the target computes in integers.
        inputs: a batch, on which each strength is tried.
        gain: the share of a layer's error that a factor must leave at most.
    """
    readers = {
        value: found
        for value in _values(graph)
        if (found := [use for use in _linear_uses(graph, value) if _kind(use) in scheme.layers])
    }
    factors: dict[str, Tensor] = {}

    def look(value: Value, x: Tensor) -> None:
        if value in readers and x.numel() and bool(x.isfinite().all()):
            weights = [_weight(use) for use in readers[value]]
            best = _best(x.reshape(-1, x.shape[-1]), weights, scheme, gain)
            if best is not None:
                factors[value.name] = best

    def observe(node: Node, results: tuple[Tensor, ...]) -> None:
        for value, result in zip(node.outputs, results, strict=True):
            look(value, result)

    for value, x in zip(graph.inputs, inputs, strict=True):
        look(value, x)
    interpret(graph, inputs, observe)
    return factors


def smooth_and_quantize(graph: Graph, plan: Plan, operators: Mapping[str, Operator]) -> None:
    """Put all of a plan into a graph that is to be written."""
    smooth(graph, plan.smoothing, operators)
    quantize_graph(graph, plan, operators)


def smooth(graph: Graph, factors: Mapping[str, Tensor], operators: Mapping[str, Operator]) -> None:
    """Put factors into a graph, and their inverses into the weights behind."""
    nodes = list(graph.nodes)
    after = dict(zip(nodes, [*nodes[1:], None], strict=True))
    for value in _values(graph):
        if value.name in factors:
            before = nodes[0] if value.producer is None else after[value.producer]
            _divide(graph, value, factors[value.name], Builder(graph, operators, before))


def _divide(graph: Graph, value: Value, factor: Tensor, build: Builder) -> None:
    readers = _linear_uses(graph, value)
    small = build("mul", value, build.constant(1 / factor, f"{value.name}_smoothing"))
    for use in readers:
        node = use.user
        assert isinstance(node, Node)
        position = node.op.trait.weight or 0
        weight = node.inputs[position]
        assert isinstance(weight, Value)
        graph.set_input(node, int(use.position), small)
        large = build.constant(partial(_times, weight, factor), f"{weight.name}_smoothed", weight.type)
        graph.set_input(node, position, large)


def _times(weight: Value, factor: Tensor) -> Tensor:
    assert weight.data is not None
    return weight.data.detach() * factor


def _values(graph: Graph) -> list[Value]:
    return [*graph.inputs, *(v for node in graph.nodes for v in node.outputs)]


def _linear_uses(graph: Graph, value: Value) -> list[Use]:
    """Return who multiplies a value, along its last side, with a weight ``float32[outputs, inputs]`` that stays."""
    return [use for use in value.uses if value.type.dtype == torch.float32 and _is_linear(graph, use)]


def _is_linear(graph: Graph, use: Use) -> bool:
    node = use.user
    if not isinstance(node, Node) or use.position != 0 or node.op.trait.weight is None:
        return False
    trait, weight = node.op.trait, node.inputs[node.op.trait.weight or 0]
    if not isinstance(weight, Value) or not weight.is_constant or weight.name in graph.state:
        return False
    return weight.type.dtype == torch.float32 and weight.type.rank == 2 and trait.axis == 0 and trait.channel == -1


def _kind(use: Use) -> str:
    assert isinstance(use.user, Node)
    return use.user.kind


def _weight(use: Use) -> Tensor:
    assert isinstance(use.user, Node)
    weight = use.user.inputs[use.user.op.trait.weight or 0]
    assert isinstance(weight, Value)
    assert weight.data is not None
    return weight.data.detach()


def _best(x: Tensor, weights: Sequence[Tensor], scheme: QuantizationScheme, gain: float) -> Tensor | None:
    """Return the factor that leaves the least error of what the layers return, None where none is worth its time."""
    lows, highs, rows = x.amin(0), x.amax(0), x[:: max(len(x) // ROWS, 1)]
    reach, inward = torch.maximum(-lows, highs), torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    wanted = [rows @ weight.T for weight in weights]

    def error(factor: Tensor) -> float:
        ends = Range(float((lows / factor).min()), float((highs / factor).max()))
        return _error(rows / factor, ends, [weight * factor for weight in weights], wanted, scheme)

    best, least = None, gain * error(torch.ones_like(reach))
    for strength in STRENGTHS:
        factor = _factor(reach, inward, strength)
        if (found := error(factor)) < least:
            best, least = factor, found
    return best


def _factor(reach: Tensor, inward: Tensor, strength: float) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    factor = reach.clamp(min=tiny).log() * strength - inward.clamp(min=tiny).log() * (1 - strength)
    return (factor - factor.median()).exp().clamp(1, MOST).float()


def _error(
    x: Tensor, ends: Range, weights: Sequence[Tensor], wanted: Sequence[Tensor], scheme: QuantizationScheme
) -> float:
    """Return the squares of what integers miss of ``x @ weight.T``, summed over all weights."""
    chosen = scale_of(ends, scheme.activations)
    read = _rounded(x, torch.tensor(chosen.scale), chosen.zero_point, scheme.activations)
    missed = 0.0
    for weight, product in zip(weights, wanted, strict=True):
        scales = weight_scales(weight, 0, scheme.weights).unsqueeze(1)
        missed += float((read @ _rounded(weight, scales, 0, scheme.weights).T - product).square().sum())
    return missed


def _rounded(x: Tensor, scale: Tensor, zero_point: int, kind: Integers) -> Tensor:
    return ((x / scale).round() + zero_point).clamp(kind.low, kind.high).sub(zero_point) * scale
