"""Importance of units: a first-order Taylor estimate of the output error, from a few backward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.pruning.batches import PruningBatches
from clika_ref.pruning.dependency_graph import DependencyGraph
from clika_ref.pruning.groups import UnitGroup
from clika_ref.quantization.algorithms.gradient_tape import UNKNOWN_SENSITIVITY, record_gradients
from clika_ref.quantization.calibration.calibrator import sample_count


@dataclass(frozen=True)
class UnitEffects:
    """The effects of removing units on the outputs, along random directions of these, per sample."""

    rows: Tensor
    """``float64[draws, units]``: the effects of units add up along a draw, and their squares are shares of the outputs'
    squared norm.
    """
    numbers: Mapping[int, int]
    """The column of each unit."""

    def of(self, units: Sequence[int]) -> Tensor:
        """Return the effects of units: ``[draws, units]``."""
        return self.rows[:, [self.numbers[unit] for unit in units]]


def estimate_effects(
    found: DependencyGraph,
    groups: Sequence[UnitGroup],
    operators: Mapping[str, Operator],
    batches: PruningBatches,
) -> UnitEffects:
    """Estimate the error of the outputs from removing units.

    Importance is activation x gradient, a first-order Taylor estimate: the change of the outputs from zeroing a
    channel. One backward pass along a random direction of the outputs gives the gradients at all layers at once.
    Averaged over directions, the square of a sum of such products is the squared error of the outputs.

    Args:
        found: the units of a graph.
        groups: the groups of removable units.
        operators: the operators of the registry.
        batches: the data.

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning (2019): its first-order score, on the
    outputs instead of a loss.
    """
    numbers = {unit: i for i, unit in enumerate(u for group in groups for u in group.units)}
    consumers = {n for group in groups for n in group.consumers}
    readers = [node for node in found.layers if node in consumers]
    clone, recorded = _insert_probes(found.graph, readers, operators)
    columns = {
        node: [
            [numbers[u] for u in numbers.keys() & found.units.plain(p)]
            for p in found.units_of(found.layers[node].x)[found.layers[node].channel].tolist()
        ]
        for node in readers
    }
    rows: list[Tensor] = []
    for inputs, weight in zip(batches.inputs, batches.weights, strict=True):
        recorder, own = record_gradients(clone, recorded, inputs), list[Tensor]()
        for slopes in recorder.iter_gradients([*recorded], batches.direction_count):
            effects = torch.zeros(sample_count(inputs), len(numbers), dtype=torch.float64)
            for node in readers:
                slope, read = slopes.get(node.name), recorder.tensors[recorded[node.name]].detach()
                product = torch.full_like(read, UNKNOWN_SENSITIVITY**0.5) if slope is None else read * slope
                _accumulate(effects, product.movedim(found.layers[node].channel, -1), columns[node])
            own.append(effects)
        rows += [effects * (weight / len(own)) ** 0.5 for effects in own]
    if not rows:
        rows.append(torch.full((1, len(numbers)), UNKNOWN_SENSITIVITY**0.5, dtype=torch.float64))
    return UnitEffects(torch.cat(rows), numbers)


def _accumulate(effects: Tensor, product: Tensor, columns: Sequence[Sequence[int]]) -> None:
    """Accumulate the effects of one layer, per sample if dim 0 is the batch dim.

    Args:
        effects: ``[samples, units]``.
        product: activation x gradient of each element, with the channels of the layer in the last dim.
        columns: the units of each channel.
    """
    by_place = product.double().cpu().nan_to_num()
    has_samples = by_place.ndim > 1 and by_place.shape[0] == len(effects)
    by_place = by_place.reshape(len(effects) if has_samples else 1, -1, by_place.shape[-1]).sum(1)
    for position, some in enumerate(columns):
        for column in some:
            effects[: len(by_place), column] += by_place[:, position]


def _insert_probes(
    graph: Graph, readers: Sequence[Node], operators: Mapping[str, Operator]
) -> tuple[Graph, dict[str, Value]]:
    """Return a clone where each given layer is the only reader of its input, and these inputs by layer name."""
    clone, names, reshape = graph.clone(), {node.name for node in readers}, operators["reshape"]
    recorded: dict[str, Value] = {}
    for node in [n for n in clone.nodes if n.name in names]:
        read = node.inputs[0]
        own = clone.insert(Node(reshape, [read], {"shape": read.type.shape}, node.origin), [read.type], node)
        clone.set_input(node, 0, own.output)
        recorded[node.name] = own.output
    return clone, recorded
