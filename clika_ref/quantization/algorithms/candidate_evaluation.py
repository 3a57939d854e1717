"""Candidate evaluation: run a whole plan on data and compare it with float, as no algorithm helps every model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.quantization.algorithms.compared_outputs import ComparedOutputs
from clika_ref.quantization.algorithms.sqnr import sum_squared_error, sum_squares
from clika_ref.quantization.calibration.calibrator import sample_count
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.fused_pairs import KnownWeights, clone_quantized, share_quantized_weights
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.targets.size_statistics import find_batch_size

MIN_EVALUATION_SAMPLES = 4
"""Samples to evaluate candidates on, or more: a whole batch takes little longer than one of its samples."""

LARGER_FACTOR = 2
"""Factor of inputs that lie outside of the calibrated range, as those of a louder recording."""


@dataclass
class CandidateEvaluation:
    """A graph, and batches to compare its plans on."""

    graph: Graph
    operators: Mapping[str, Operator]
    """The operators of the registry."""
    batches: Sequence[Sequence[Tensor]]
    """Inputs of the graph; their shapes may differ."""
    quantized_weights: KnownWeights = field(default_factory=dict[str, Any], repr=False)
    """Quantized weights that the next plan may share."""

    @cached_property
    def outputs(self) -> list[list[Tensor]]:
        """The branches of `ComparedOutputs` in float, for each batch."""
        return [self._run(self._float_graph, inputs) for inputs in self.batches]

    def error(self, plan: Plan) -> float:
        """Return ``||Q - F||^2 / ||F||^2`` over all batches, with the weights of `OutputBranches.compute_weights`."""
        twin = clone_quantized(self._float_graph, plan, self.operators)
        share_quantized_weights(twin, self.quantized_weights)
        errors = [
            [sum_squared_error(f, w) for f, w in zip(self._run(twin, inputs), expected, strict=True)]
            for inputs, expected in zip(self.batches, self.outputs, strict=True)
        ]
        totals = (sum(parts) for parts in zip(*errors, strict=True))
        return sum(total * weight for total, weight in zip(totals, self._weights, strict=True))

    @cached_property
    def _weights(self) -> list[float]:
        squared_norms = [[sum_squares(w) for w in expected] for expected in self.outputs]
        return self._compared.branches.compute_weights([sum(parts) for parts in zip(*squared_norms, strict=True)])

    @cached_property
    def on_larger_inputs(self) -> CandidateEvaluation | None:
        """The same with float inputs times `LARGER_FACTOR`; None if all inputs are integers."""
        if not any(x.is_floating_point() for inputs in self.batches for x in inputs):
            return None
        larger = [[x * LARGER_FACTOR if x.is_floating_point() else x for x in inputs] for inputs in self.batches]
        return replace(self, batches=larger)

    @cached_property
    def _compared(self) -> ComparedOutputs:
        return ComparedOutputs(self.graph)

    @cached_property
    def _float_graph(self) -> Graph:
        return self._compared.make_graph()

    @torch.no_grad()
    def _run(self, graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._compared.branches.split([x for x in run_graph(graph, inputs) if x.is_floating_point()])


def select_evaluation_batches(graph: Graph, batches: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return few batches with samples from the quietest to the loudest, as data may vary from sample to sample.

    Samples of batches with equal shapes are mixed if the inputs and outputs of the graph have the same dim 0, which is
    then their batch dim. A mixed batch has the size of a given one, which the graph is known to accept. Other batches
    are returned as they are, two at least.
    """
    first = batches[0]
    size = sample_count(first)
    count = math.ceil(MIN_EVALUATION_SAMPLES / size)
    alike = [batch for batch in batches if [x.shape for x in batch] == [x.shape for x in first]]
    if len(alike) < 2 or find_batch_size((*graph.inputs, *graph.outputs)) is None:
        return _space_by_loudness(batches, max(count, 2))
    samples = _space_by_loudness([[x[i : i + 1] for x in batch] for batch in alike for i in range(size)], count * size)
    mixed = [samples[start : start + size] for start in range(0, len(samples) // size * size, size)]
    return [[torch.cat(tensors) for tensors in zip(*batch, strict=True)] for batch in mixed]


def _space_by_loudness(batches: Sequence[Sequence[Tensor]], count: int) -> list[Sequence[Tensor]]:
    """Return this many batches, or all, at equal distances from the quietest to the loudest."""
    ordered = sorted(batches, key=_loudness)
    last, count = len(ordered) - 1, min(count, len(ordered))
    return [ordered[round(number * last / max(count - 1, 1))] for number in range(count)]


def _loudness(batch: Sequence[Tensor]) -> float:
    """Return the mean square of the float inputs."""
    floats = [x for x in batch if x.is_floating_point()]
    return sum(sum_squares(x) for x in floats) / max(sum(x.numel() for x in floats), 1)
