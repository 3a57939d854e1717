"""An artifact in integers held against what its own graph computes: it may lose no more of the float model's signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from clika_ref.core.errors import TargetError
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node
from clika_ref.core.targets import Artifact, Target
from clika_ref.emulation import place_of
from clika_ref.exporting.layer_check import first_broken_layer
from clika_ref.exporting.rounded_inputs import as_multiplied, rounding_layers
from clika_ref.quantization.calibration import sample_count
from clika_ref.quantization.decision import decibels
from clika_ref.quantization.energy import energy, missed
from clika_ref.quantization_scheme import scheme_of

MARGIN_DB = 0.5
"""Decibels that an artifact may lose against the simulation: roundings differ, and grow through depth."""

FEWEST_SAMPLES = 16
"""Samples over which that margin holds; over fewer, a single rounding may weigh more."""

WIDE_MARGIN_DB = 3.0
"""Of so few, and of half precisions: a node that becomes several operators rounds more often there."""

FLOAT_DB = 100.0
"""What is this near to the float model differs by roundings of floats alone: an output before which nothing becomes
integers misses nothing in the graph, and some roundings in a runtime (`artifact_check.AGREEMENT`: at worst 84 dB)."""


def compare_quantized(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[torch.Tensor]],
    expected: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> str:
    """Run an artifact and its graph on every example; return one sentence for the log.

    Element by element they cannot agree: where a sum lies between two integers, runtimes round it to either.

    Args:
        artifact: what the target made of the graph.
        target: which runs it.
        graph: with its integers.
        examples: inputs, as many samples as there are.
        expected: the float model.

    Raises:
        TargetError: the artifact is further from the float model than its graph is; the message names the first layer
            that differs by itself.
    """
    problem = target.missing()
    if problem is not None:
        return f"not compared: {problem}"
    if any(node.is_random for node in graph.nodes):
        return "not compared: the model draws random numbers"
    noises = _noises(artifact, target, graph, examples, expected)
    whole, samples = sum(noises.values(), _Noise()), sum(map(sample_count, examples))
    margin = MARGIN_DB if samples >= FEWEST_SAMPLES and not _has_halves(graph) else WIDE_MARGIN_DB
    problems = [_too_noisy(whole, margin)]
    problems += [
        f"{alone}, of its output {name!r}"
        for name, noise in noises.items()
        if (alone := _too_noisy(noise, WIDE_MARGIN_DB))
    ]
    problem = next(filter(None, problems), "")
    if problem:
        msg = (
            f"{place_of(target)} runs the artifact {problem}, over {samples} samples: it does not compute what was "
            f"planned. {first_broken_layer(target, graph, examples[0])}. "
            "No file was put in place; compile with compare_after_export=False to look at one"
        )
        raise TargetError(msg)
    told = f"{whole.by_artifact:.1f} dB over {samples} samples in {place_of(target)}, simulated {whole.by_graph:.1f} dB"
    exactly = f", {decibels(whole.signal, whole.exact):.1f} dB without what it rounds as it multiplies"
    return told + exactly * (whole.simulated != whole.exact)


def _too_noisy(noise: _Noise, margin: float) -> str:
    """Say how far an artifact is from the float model, if it is further than its graph by more than a margin."""
    if noise.by_artifact >= min(noise.by_graph - margin, FLOAT_DB):
        return ""
    return f"at {noise.by_artifact:.1f} dB where its graph has {noise.by_graph:.1f} dB"


def _noises(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[Tensor]],
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> dict[str, _Noise]:
    """Return what is missed of each output of floats, by its name, over all examples."""
    runner, rounding = target.load(artifact), _rounding_layers(graph, target)
    noises = {i: _Noise() for i, v in enumerate(graph.outputs) if v.type.dtype.is_floating_point}
    for inputs in examples:
        wanted = expected(inputs)
        with torch.no_grad():
            exact, _ = interpret(graph, [t.clone() for t in inputs])
            simulated = as_multiplied(graph, inputs, rounding) if rounding else exact
        found = runner(inputs)
        for i, noise in noises.items():
            noise.add(wanted[i], exact[i], simulated[i], found[i])
    return {f"{i}, {graph.outputs[i].name}": noise for i, noise in noises.items()}


@dataclass
class _Noise:
    """Energies of an output, and of what is missed of it."""

    signal: float = 0.0
    exact: float = 0.0
    """By the graph."""
    simulated: float = 0.0
    """By the graph, with what the runtime rounds as it multiplies."""
    artifact: float = 0.0

    def add(self, wanted: Tensor, exact: Tensor, simulated: Tensor, found: Tensor) -> None:
        """Count one more batch."""
        self.signal += energy(wanted)
        self.exact += missed(exact, wanted)
        self.simulated += missed(simulated, wanted)
        self.artifact += missed(found, wanted)

    def __add__(self, other: _Noise) -> _Noise:
        return _Noise(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def by_graph(self) -> float:
        """What is left of the signal in the graph, in dB."""
        return decibels(self.signal, self.simulated)

    @property
    def by_artifact(self) -> float:
        """The same in the artifact."""
        return decibels(self.signal, self.artifact)


def _has_halves(graph: Graph) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(v.type.dtype in halves for node in graph.nodes for v in node.outputs)


def _rounding_layers(graph: Graph, target: Target) -> dict[Node, int]:
    """Return the layers that a target rounds the inputs of as it multiplies, and how many elements share a scale."""
    scheme = scheme_of(target)
    return rounding_layers(graph, scheme.weights_only) if scheme and scheme.weights_only else {}
