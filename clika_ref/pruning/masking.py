"""Masks of the layers of a graph: which each gets, as its sensitivity lets, and what that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.pruning.layer_sides import LayerSides
from clika_ref.pruning.layers import ARGUMENT, Choice
from clika_ref.pruning.masks import masked_by, of_least_magnitude, of_pattern
from clika_ref.pruning_settings import pattern
from clika_ref.quantization.tape import Tape, taped

SHARES = tuple(i / 20 for i in range(1, 20))
"""Of a weight that may go, of which the largest is taken that is not too sensitive: steps of 5 %."""


@dataclass(frozen=True)
class Masked:
    """What becomes of the weight of a layer."""

    mask: Tensor | None
    sensitivity: float | None
    decision: str


def maskings(
    graph: Graph, layers: Mapping[Node, LayerSides], chosen: Mapping[Node, Choice], inputs: Sequence[Tensor]
) -> dict[Node, Masked]:
    """Return for each layer that is to be masked what becomes of its weight.

    What a layer returns otherwise with a masked weight is computed, and weighed by what that makes of the outputs, as
    quantization sensitivity is.

    Raises:
        ModelError: an N:M mask is asked for by the name of a layer whose size it does not divide.
    """
    found: dict[Node, Masked] = {}
    open_: dict[Node, list[float]] = {}
    for node, layer in layers.items():
        reason = _unfit(node, layer, chosen[node])
        if reason:
            found[node] = Masked(None, None, reason)
        else:
            open_[node] = _shares(chosen[node])
    if not open_:
        return found
    tape = taped(graph, {node: node.output for node in open_}, inputs)
    weighed: dict[tuple[Node, float], float] = {}
    for step in range(max(map(len, open_.values()), default=0)):
        shares = {node: some[step] for node, some in open_.items() if step < len(some)}
        errors = {node: _error(tape, node, layers[node], chosen[node], share) for node, share in shares.items()}
        weighed |= {(node, shares[node]): error for node, error in tape.weigh(errors).items()}
    for node, shares in open_.items():
        found[node] = _taken(layers[node], chosen[node], {share: weighed[node, share] for share in shares})
    return {node: found[node] for node in layers}


def mask_of(layer: LayerSides, choice: Choice, share: float) -> Tensor:
    """Return the mask of a weight, given which share of it goes."""
    weight, kept = _numbers(layer.weight), pattern(choice.mask_type)
    return of_pattern(weight, layer.inner, *kept) if kept else of_least_magnitude(weight, share)


def _numbers(weight: Value) -> Tensor:
    """Return a weight, with zeros where it is masked."""
    parameter, mask = masked_by(weight)
    assert parameter.data is not None
    data = parameter.data.detach()
    return data if mask is None or mask.data is None else data * mask.data


def _shares(choice: Choice) -> list[float]:
    """Return the shares of a weight that may go, ascending."""
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


def _unfit(node: Node, layer: LayerSides, choice: Choice) -> str:
    """Say why a layer cannot have its mask, or nothing."""
    if not masked_by(layer.weight)[0].is_constant:
        return "its weight is computed from others"
    if choice.skipped:
        return choice.skipped
    kept, side = pattern(choice.mask_type), int(layer.weight.type.shape[layer.inner])
    if kept and side % kept[1]:
        reason = (
            f"mask_type={choice.mask_type!r} takes {kept[1]} of the inputs of each output at a time, and {side} are no "
            "multiple of it"
        )
        if choice.named:
            msg = f"{ARGUMENT}: {choice.named!r}: {reason}; choose another mask for {node!r} in {node.origin}"
            raise ModelError(msg)
        return reason
    return ""


@torch.no_grad()
def _error(tape: Tape, node: Node, layer: LayerSides, choice: Choice, share: float) -> Tensor:
    """Return what a layer returns otherwise with a masked weight."""
    weight = _numbers(layer.weight)
    operands = [tape.held[v] if v in tape.held else v.data if isinstance(v, Value) else v for v in node.inputs]
    operands[node.op.trait.weight or 0] = weight * mask_of(layer, choice, share)
    return node.op(*operands, **node.attrs) - tape.held[node.output]


def _taken(layer: LayerSides, choice: Choice, weighed: Mapping[float, float]) -> Masked:
    """Take the largest share that is not too sensitive."""
    limit = choice.threshold
    fitting = [share for share, error in weighed.items() if limit is None or error <= limit]
    if not fitting:
        share, error = min(weighed.items())
        text = f"too sensitive: {error:.2g} without {share:.0%} is above pruning_sensitivity_threshold={limit:g}"
        return Masked(None, error, text)
    share = max(fitting)
    return Masked(mask_of(layer, choice, share), weighed[share], f"{share:.0%} of its weights masked")
