"""Choose the masks of the layers of a graph, by their sensitivity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pruning.agreeing import agreed_mask
from clika_ref.pruning.batches import Batches
from clika_ref.pruning.layer_sides import LayerSides
from clika_ref.pruning.layers import Choice
from clika_ref.pruning.masks import masked_by, of_least_magnitude, of_pattern
from clika_ref.pruning_settings import pattern
from clika_ref.quantization.tape import Tape, taped

SHARES = tuple(i / 20 for i in range(1, 20))
"""Candidate shares of a weight to mask, in steps of 5 %; the largest that is not too sensitive is chosen."""


@dataclass(frozen=True)
class Masked:
    """The decision for the weight of a layer."""

    mask: Tensor | None
    sensitivity: float | None
    decision: str


def maskings(
    graph: Graph, layers: Mapping[Node, LayerSides], chosen: Mapping[Node, Choice], batches: Batches
) -> dict[Node, Masked]:
    """Return the masking decision for each layer.

    The change of a layer's output by a mask is computed, and its effect on the outputs estimated, as for quantization
    sensitivity. Layers that share a weight share its mask, and their effects are added.

    Raises:
        ModelError: the user requests by name a mask that a layer's weight cannot have.
    """
    found: dict[Node, Masked] = {}
    open_: dict[Value, tuple[Sequence[Node], Choice]] = {}
    for weight, sharing in _by_weight(layers).items():
        choice = agreed_mask(sharing, chosen)
        if choice.skipped:
            found |= dict.fromkeys(sharing, Masked(None, None, choice.skipped))
        else:
            open_[weight] = [*sharing], choice
    for (nodes, choice), weighed in zip(
        open_.values(), _weighed(graph, layers, [*open_.values()], batches), strict=True
    ):
        found |= dict.fromkeys(nodes, _taken(layers[nodes[0]], choice, weighed))
    return {node: found[node] for node in layers}


def _by_weight(layers: Mapping[Node, LayerSides]) -> dict[Value, dict[Node, LayerSides]]:
    """Return the layers that multiply by each weight."""
    found: dict[Value, dict[Node, LayerSides]] = {}
    for node, layer in layers.items():
        found.setdefault(layer.weight, {})[node] = layer
    return found


def _weighed(
    graph: Graph,
    layers: Mapping[Node, LayerSides],
    weights: Sequence[tuple[Sequence[Node], Choice]],
    batches: Batches,
) -> list[dict[float, float]]:
    """Return for each weight the error of the outputs by masked share, given the layers that share it."""
    found = [dict.fromkeys(_shares(choice), 0.0) for _, choice in weights]
    for inputs, part in zip(batches.inputs, batches.weights, strict=True) if weights else ():
        tape = taped(graph, {node: node.output for nodes, _ in weights for node in nodes}, inputs)
        for step in range(max(map(len, found))):
            shares = [[*by_share][step : step + 1] for by_share in found]
            errors = {
                node: _error(tape, node, layers[node], choice, share)
                for (nodes, choice), some in zip(weights, shares, strict=True)
                for share in some
                for node in nodes
            }
            missed = tape.weigh(errors, probes=batches.probes)
            for (nodes, _), some, by_share in zip(weights, shares, found, strict=True):
                for share in some:
                    by_share[share] += part * _at_most(missed[node] for node in nodes)
    return found


def _at_most(missed: Iterable[float]) -> float:
    """Return an upper bound of the joint squared error: the norms add up."""
    return sum(one**0.5 for one in missed) ** 2


def mask_of(layer: LayerSides, choice: Choice, share: float) -> Tensor:
    """Return the mask of a weight for a masked share."""
    weight, kept = _numbers(layer.weight), pattern(choice.mask_type)
    return of_pattern(weight, layer.inner, *kept) if kept else of_least_magnitude(weight, share)


def _numbers(weight: Value) -> Tensor:
    """Return a weight, with zeros where it is masked."""
    parameter, mask = masked_by(weight)
    assert parameter.data is not None
    data = parameter.data.detach()
    return data if mask is None or mask.data is None else data * mask.data


def _shares(choice: Choice) -> list[float]:
    """Return the candidate shares of a weight, ascending."""
    kept = pattern(choice.mask_type)
    if kept:
        return [1 - kept[0] / kept[1]]
    if choice.sparsity is None:
        return list(SHARES)
    return (
        [choice.sparsity]
        if choice.threshold is None
        else [*(s for s in SHARES if s < choice.sparsity), choice.sparsity]
    )


@torch.no_grad()
def _error(tape: Tape, node: Node, layer: LayerSides, choice: Choice, share: float) -> Tensor:
    """Return the change of a layer's output with a masked weight."""
    weight = _numbers(layer.weight)
    operands = [tape.held[v] if v in tape.held else v.data if isinstance(v, Value) else v for v in node.inputs]
    operands[node.op.trait.weight or 0] = weight * mask_of(layer, choice, share)
    return node.op(*operands, **node.attrs) - tape.held[node.output]


def _taken(layer: LayerSides, choice: Choice, weighed: Mapping[float, float]) -> Masked:
    """Choose the largest share that is not too sensitive."""
    limit = choice.threshold
    fitting = [share for share, error in weighed.items() if limit is None or error <= limit]
    if not fitting:
        share, error = min(weighed.items())
        text = f"too sensitive: {error:.2g} without {share:.0%} is above pruning_sensitivity_threshold={limit:g}"
        return Masked(None, error, text)
    share = max(fitting)
    return Masked(mask_of(layer, choice, share), weighed[share], f"{share:.0%} of its weights masked")
