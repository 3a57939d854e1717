"""The batches for estimating output errors, with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clika_ref.core.ir import Graph
from clika_ref.quantization.algorithms.gradient_tape import ERROR_SAMPLES
from clika_ref.quantization.algorithms.sqnr import mean_ratio, sum_squared_error, sum_squares
from clika_ref.quantization.calibration.calibrator import sample_count
from clika_ref.quantization.graph_runs import compute_outputs

MIN_PRUNING_SAMPLES = 32
"""Minimum number of samples, over as many batches as needed: with fewer, rarely used weights would be pruned."""


@dataclass(frozen=True)
class PruningBatches:
    """Batches, and the outputs of a graph for them before pruning."""

    inputs: Sequence[Sequence[Tensor]]
    float_outputs: Sequence[Sequence[Tensor]]
    """The float outputs for each batch."""

    @classmethod
    def of(cls, graph: Graph, inputs: Sequence[Sequence[Tensor]]) -> PruningBatches:
        """Run a graph on one batch or more; tensors from inference mode are cloned for autograd."""
        own = [[x.clone() if x.is_inference() else x for x in some] for some in inputs]
        return cls(own, [_outputs(graph, some) for some in own])

    @property
    def samples(self) -> int:
        """Number of samples in total."""
        return sum(map(sample_count, self.inputs))

    @property
    def direction_count(self) -> int:
        """Number of random output directions per batch: with all samples, at least `ERROR_SAMPLES` in total."""
        return -(-ERROR_SAMPLES // self.samples)

    @property
    def weights(self) -> list[float]:
        """The weight of each batch: its share of the squared norm of the outputs."""
        squared_norms = [sum(map(sum_squares, outputs)) for outputs in self.float_outputs]
        return [one / sum(squared_norms) if any(squared_norms) else 1 / len(squared_norms) for one in squared_norms]

    def relative_error(self, graph: Graph) -> float:
        """Return ``||F - W||^2 / ||W||^2`` for the current outputs F over all samples, averaged over the outputs."""
        found = [_outputs(graph, some) for some in self.inputs]
        by_output = zip(zip(*found, strict=True), zip(*self.float_outputs, strict=True), strict=True)
        return mean_ratio(
            (sum(map(sum_squared_error, now, before)), sum(map(sum_squares, before))) for now, before in by_output
        )


def _outputs(graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [o for o in compute_outputs(graph, inputs) if o.is_floating_point()]
