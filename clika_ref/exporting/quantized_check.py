"""An artifact in integers held against what its own graph computes: it may lose no more of the float model's signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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
    runner, rounding = target.load(artifact), _rounding_layers(graph, target)
    signal = simulated_noise = noise = exact_noise = 0.0
    samples = 0
    for inputs in examples:
        wanted = expected(inputs)
        with torch.no_grad():
            exact, _ = interpret(graph, [t.clone() for t in inputs])
            simulated = as_multiplied(graph, inputs, rounding) if rounding else exact
        found = runner(inputs)
        signal += sum(energy(w) for w in wanted if w.is_floating_point())
        simulated_noise += _distance(wanted, simulated)
        exact_noise += _distance(wanted, exact)
        noise += _distance(wanted, found)
        samples += sample_count(inputs)
    by_graph, by_artifact = decibels(signal, simulated_noise), decibels(signal, noise)
    margin = MARGIN_DB if samples >= FEWEST_SAMPLES and not _has_halves(graph) else WIDE_MARGIN_DB
    if not by_artifact >= by_graph - margin:
        msg = (
            f"{place_of(target)} runs the artifact at {by_artifact:.1f} dB over {samples} samples, where its graph has "
            f"{by_graph:.1f} dB: it does not compute what was planned. "
            f"{first_broken_layer(target, graph, examples[0])}. "
            "No file was put in place; compile with compare_after_export=False to look at one"
        )
        raise TargetError(msg)
    told = f"{by_artifact:.1f} dB over {samples} samples in {place_of(target)}, simulated {by_graph:.1f} dB"
    exactly = f", {decibels(signal, exact_noise):.1f} dB without what it rounds as it multiplies"
    return told + exactly * (simulated_noise != exact_noise)


def _has_halves(graph: Graph) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(v.type.dtype in halves for node in graph.nodes for v in node.outputs)


def _rounding_layers(graph: Graph, target: Target) -> dict[Node, int]:
    """Return the layers that a target rounds the inputs of as it multiplies, and how many elements share a scale."""
    scheme = scheme_of(target)
    return rounding_layers(graph, scheme.weights_only) if scheme and scheme.weights_only else {}


def _distance(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    return sum(missed(f, w) for w, f in zip(wanted, found, strict=True) if w.is_floating_point())
