"""Choose the masks of the layers of a graph, by their sensitivity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pruning.batches import PruningBatches
from clika_ref.pruning.channel_dims import ChannelDims
from clika_ref.pruning.layer_settings import PruningChoice
from clika_ref.pruning.masks import make_magnitude_mask, make_pattern_mask, split_mask
from clika_ref.pruning.shared_settings import resolve_mask
from clika_ref.quantization.algorithms.gradient_tape import GradientRecorder, record_gradients
from clika_ref.quantization.qdq.layer_weights import data_of
from clika_ref.settings.pruning import parse_pattern

CANDIDATE_SHARES = tuple(i / 20 for i in range(1, 20))
"""Candidate shares of a weight to mask, in steps of 5 %; the largest that is not too sensitive is chosen."""


@dataclass(frozen=True)
class MaskResult:
    """The decision for the weight of a layer."""

    mask: Tensor | None
    sensitivity: float | None
    decision: str


def choose_masks(
    graph: Graph, layers: Mapping[Node, ChannelDims], chosen: Mapping[Node, PruningChoice], batches: PruningBatches
) -> dict[Node, MaskResult]:
    """Return the masking decision for each layer.

    The change of a layer's output by a mask is computed, and its effect on the outputs estimated, as for quantization
    sensitivity. Layers that share a weight share its mask, and their effects are added.

    Raises:
        ModelError: the user requests by name a mask that a layer's weight cannot have.
    """
    found: dict[Node, MaskResult] = {}
    open_: dict[Value, tuple[Sequence[Node], PruningChoice]] = {}
    for weight, sharing in _by_weight(layers).items():
        choice = resolve_mask(sharing, chosen)
        if choice.skipped:
            found |= dict.fromkeys(sharing, MaskResult(None, None, choice.skipped))
        else:
            open_[weight] = [*sharing], choice
    for (nodes, choice), sensitivities in zip(
        open_.values(), _estimate_errors(graph, layers, [*open_.values()], batches), strict=True
    ):
        found |= dict.fromkeys(nodes, _choose_share(layers[nodes[0]], choice, sensitivities))
    return {node: found[node] for node in layers}


def _by_weight(layers: Mapping[Node, ChannelDims]) -> dict[Value, dict[Node, ChannelDims]]:
    """Return the layers that multiply by each weight."""
    found: dict[Value, dict[Node, ChannelDims]] = {}
    for node, layer in layers.items():
        found.setdefault(layer.weight, {})[node] = layer
    return found


def _estimate_errors(
    graph: Graph,
    layers: Mapping[Node, ChannelDims],
    weights: Sequence[tuple[Sequence[Node], PruningChoice]],
    batches: PruningBatches,
) -> list[dict[float, float]]:
    """Return for each weight the error of the outputs by masked share, given the layers that share it."""
    found = [dict.fromkeys(_candidate_shares(choice), 0.0) for _, choice in weights]
    for inputs, part in zip(batches.inputs, batches.weights, strict=True) if weights else ():
        recorder = record_gradients(graph, {node: node.output for nodes, _ in weights for node in nodes}, inputs)
        for step in range(max(map(len, found))):
            shares = [[*by_share][step : step + 1] for by_share in found]
            errors = {
                node: _output_error(recorder, node, layers[node], choice, share)
                for (nodes, choice), some in zip(weights, shares, strict=True)
                for share in some
                for node in nodes
            }
            squared_errors = recorder.estimate_effects(errors, probes=batches.direction_count)
            for (nodes, _), some, by_share in zip(weights, shares, found, strict=True):
                for share in some:
                    by_share[share] += part * _bound_joint_error(squared_errors[node] for node in nodes)
    return found


def _bound_joint_error(squared_errors: Iterable[float]) -> float:
    """Return an upper bound of the joint squared error: the norms add up."""
    return sum(one**0.5 for one in squared_errors) ** 2


def make_mask(layer: ChannelDims, choice: PruningChoice, share: float) -> Tensor:
    """Return the mask of a weight for a masked share."""
    weight, pattern = _read_weight(layer.weight), parse_pattern(choice.mask_type)
    return make_pattern_mask(weight, layer.inner, *pattern) if pattern else make_magnitude_mask(weight, share)


def _read_weight(weight: Value) -> Tensor:
    """Return a weight, with zeros where it is masked."""
    parameter, mask = split_mask(weight)
    data = data_of(parameter)
    return data if mask is None or mask.data is None else data * mask.data


def _candidate_shares(choice: PruningChoice) -> list[float]:
    """Return the candidate shares of a weight, ascending."""
    pattern = parse_pattern(choice.mask_type)
    if pattern:
        return [1 - pattern[0] / pattern[1]]
    if choice.sparsity is None:
        return list(CANDIDATE_SHARES)
    return (
        [choice.sparsity]
        if choice.threshold is None
        else [*(s for s in CANDIDATE_SHARES if s < choice.sparsity), choice.sparsity]
    )


@torch.no_grad()
def _output_error(
    recorder: GradientRecorder, node: Node, layer: ChannelDims, choice: PruningChoice, share: float
) -> Tensor:
    """Return the change of a layer's output with a masked weight."""
    weight = _read_weight(layer.weight)
    operands = [
        recorder.tensors[v] if v in recorder.tensors else v.data if isinstance(v, Value) else v for v in node.inputs
    ]
    operands[node.op.trait.weight or 0] = weight * make_mask(layer, choice, share)
    return node.op(*operands, **node.attrs) - recorder.tensors[node.output]


def _choose_share(layer: ChannelDims, choice: PruningChoice, sensitivities: Mapping[float, float]) -> MaskResult:
    """Choose the largest share that is not too sensitive."""
    limit = choice.threshold
    fitting = [share for share, error in sensitivities.items() if limit is None or error <= limit]
    if not fitting:
        share, error = min(sensitivities.items())
        text = (
            f"too sensitive: error {error:.2g} with {share:.0%} masked is above pruning_sensitivity_threshold={limit:g}"
        )
        return MaskResult(None, error, text)
    share = max(fitting)
    return MaskResult(make_mask(layer, choice, share), sensitivities[share], f"{share:.0%} of the weights masked")
