"""The batches on which is weighed what the outputs would miss, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph
from clika_ref.quantization.calibration import sample_count
from clika_ref.quantization.energy import energy, mean_share, missed
from clika_ref.quantization.tape import DRAWS

FEWEST_SAMPLES = 32
"""Samples that are weighed on, of as many batches as it takes: what others need must not go for want of them."""


def enough(batches: Iterable[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return the first batches that have `FEWEST_SAMPLES` together, or all; no further ones are read."""
    chosen: list[Sequence[Tensor]] = []
    count = 0
    for inputs in batches:
        chosen.append(inputs)
        count += sample_count(inputs)
        if count >= FEWEST_SAMPLES:
            break
    return chosen


@dataclass(frozen=True)
class Batches:
    """Batches, and what a graph returned for them before anything went."""

    inputs: Sequence[Sequence[Tensor]]
    wished: Sequence[Sequence[Tensor]]
    """The float outputs of each."""

    @classmethod
    def of(cls, graph: Graph, inputs: Sequence[Sequence[Tensor]]) -> Batches:
        """Run a graph on batches, of which there is one at least; what inference mode has made is copied for slopes."""
        own = [[x.clone() if x.is_inference() else x for x in some] for some in inputs]
        return cls(own, [_outputs(graph, some) for some in own])

    @property
    def samples(self) -> int:
        """How many there are in all."""
        return sum(map(sample_count, self.inputs))

    @property
    def probes(self) -> int:
        """In how many random directions of the outputs each is weighed: all together make `DRAWS` with the samples."""
        return -(-DRAWS // self.samples)

    @property
    def weights(self) -> list[float]:
        """How much each counts: its share of the outputs' energy, of which shares of errors are."""
        energies = [sum(map(energy, outputs)) for outputs in self.wished]
        return [one / sum(energies) if any(energies) else 1 / len(energies) for one in energies]

    def missed(self, graph: Graph) -> float:
        """Return ``||F - W||^2 / ||W||^2`` for what a graph returns now, over all samples: the mean of all outputs."""
        found = [_outputs(graph, some) for some in self.inputs]
        by_output = zip(zip(*found, strict=True), zip(*self.wished, strict=True), strict=True)
        return mean_share((sum(map(missed, now, before)), sum(map(energy, before))) for now, before in by_output)


def _outputs(graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        outputs, _ = interpret(graph, [x.clone() for x in inputs])
    return [o for o in outputs if o.is_floating_point()]
