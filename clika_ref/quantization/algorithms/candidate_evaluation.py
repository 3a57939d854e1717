"""Candidate evaluation: run a whole plan on data and compare it with float, as no algorithm helps every model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.quantization.algorithms.sqnr import mean_ratio, sum_squared_error, sum_squares
from clika_ref.quantization.calibration.calibrator import sample_count
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.fused_pairs import clone_quantized
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

    @cached_property
    def outputs(self) -> list[list[Tensor]]:
        """Outputs of the graph in float for each batch: one tensor for each output, without integer tensors."""
        return [self._run(self.graph, inputs) for inputs in self.batches]

    def error(self, plan: Plan) -> float:
        """Return ``||Q - F||^2 / ||F||^2`` over all batches, averaged over all float outputs that are not 0.

        Raises:
            ModelError: an output has another size when quantized, as its size depends on the data.
        """
        twin = clone_quantized(self.graph, plan, self.operators)
        errors = [
            [_compare(f, w) for f, w in zip(self._run(twin, inputs), expected, strict=True)]
            for inputs, expected in zip(self.batches, self.outputs, strict=True)
        ]
        return mean_ratio((sum(e for e, _ in parts), sum(w for _, w in parts)) for parts in zip(*errors, strict=True))

    @cached_property
    def on_larger_inputs(self) -> CandidateEvaluation | None:
        """The same with float inputs times `LARGER_FACTOR`; None if all inputs are integers."""
        if not any(x.is_floating_point() for inputs in self.batches for x in inputs):
            return None
        larger = [[x * LARGER_FACTOR if x.is_floating_point() else x for x in inputs] for inputs in self.batches]
        return replace(self, batches=larger)

    @torch.no_grad()
    def _run(self, graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [o for o in run_graph(graph, inputs) if o.is_floating_point()]


def _compare(quantized: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the squared error of a quantized output, and the sum of squares of the float one.

    Raises:
        ModelError: they have different shapes.
    """
    if quantized.shape != expected.shape:
        raise ModelError(
            f"an output has the shape {list(quantized.shape)} when quantized, and {list(expected.shape)} in float: its "
            "size depends on the data, as that of a detector's boxes, so that the two cannot be compared. Compile "
            "without quantization_settings, or quantize the part of the model before it selects results."
        )
    return sum_squared_error(quantized, expected), sum_squares(expected)


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
