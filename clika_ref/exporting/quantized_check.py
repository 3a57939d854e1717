"""Compare a quantized artifact with the simulation of its graph: it may not lose more of the float model's signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Node
from clika_ref.core.targets import Artifact, Target
from clika_ref.disagreement import DisagreementError
from clika_ref.emulation import place_of
from clika_ref.exporting.layer_check import first_broken_layer
from clika_ref.exporting.rounded_inputs import as_multiplied, rounding_layers
from clika_ref.exporting.running import runner_of
from clika_ref.quantization.calibration import sample_count
from clika_ref.quantization.decision import decibels
from clika_ref.quantization.energy import energy, missed_by_sample
from clika_ref.quantization_scheme import scheme_of

MARGIN_DB = 0.5
"""Decibels that an artifact may lose against the simulation: rounding differs, and accumulates with depth."""

FEWEST_SAMPLES = 16
"""Minimum number of samples for that margin; with fewer, a single rounding may matter more."""

WIDE_MARGIN_DB = 3.0
"""The margin for fewer samples, and for FP16/BF16, where a node lowered to several operators rounds more often."""

SCATTER = 2.0
"""Standard errors of the mean up to which a difference may be due to the chosen samples.

In an ill-conditioned model, each rounding changes all later results: the errors of an artifact and its graph are then
similar on average, but differ from sample to sample.
"""

FLOAT_DB = 100.0
"""SQNR above which the difference to the float model is due to float rounding alone.

An output without quantized nodes before it has no error in the graph, and a few float roundings in a runtime
(`artifact_check.AGREEMENT`: 84 dB).
"""


def compare_quantized(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[torch.Tensor]],
    expected: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> str:
    """Run an artifact and its graph on every example; return one sentence for the log.

    They cannot agree element by element: for a sum between two integers, runtimes may round either way.

    Args:
        artifact: the artifact.
        target: the target that runs it.
        graph: the quantized graph that it was compiled from.
        examples: inputs, one tensor for each input of the graph.
        expected: the float model.

    Raises:
        DisagreementError: the artifact is further from the float model than its graph; the message names the first
            layer that differs on its own.
        TargetError: the target declares an invalid scheme.
    """
    problem = target.missing()
    if problem is not None:
        return f"not compared: {problem}"
    if any(node.is_random for node in graph.nodes):
        return "not compared: the model draws random numbers"
    noises = _noises(artifact, target, graph, examples, expected)
    whole, samples = _Noise.of_all(noises.values()), sum(map(sample_count, examples))
    is_narrow = samples >= FEWEST_SAMPLES and not _has_halves(graph) and whole.is_beyond_chance(MARGIN_DB)
    margin = MARGIN_DB if is_narrow else WIDE_MARGIN_DB
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
        raise DisagreementError(msg)
    told = f"{whole.by_artifact:.1f} dB over {samples} samples in {place_of(target)}, simulated {whole.by_graph:.1f} dB"
    exactly = f", {decibels(whole.signal, sum(whole.exact)):.1f} dB without what it rounds as it multiplies"
    return told + exactly * (whole.simulated != whole.exact)


def _too_noisy(noise: _Noise, margin: float) -> str:
    """Describe the SQNR of an artifact if it is below that of its graph by more than a margin, empty otherwise."""
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
    """Return the errors of each float output, by its name, over all examples."""
    runner, rounding = runner_of(target, artifact), _rounding_layers(graph, target)
    noises = {i: _Noise() for i, v in enumerate(graph.outputs) if v.type.dtype.is_floating_point}
    for inputs in examples:
        wanted = expected(inputs)
        with torch.no_grad():
            exact, _ = interpret(graph, [t.clone() for t in inputs])
            simulated = as_multiplied(graph, inputs, rounding) if rounding else exact
        found = runner(inputs)
        samples = _samples([wanted[i] for i in noises], sample_count(inputs))
        for i, noise in noises.items():
            noise.add(wanted[i], exact[i], simulated[i], found[i], samples)
    return {f"{i}, {graph.outputs[i].name}": noise for i, noise in noises.items()}


def _samples(outputs: Sequence[Tensor], count: int) -> int:
    """Return the number of samples along the first dim of the outputs; 1 if an output cannot be split."""
    return count if count and all(x.ndim and x.shape[0] == count for x in outputs) else 1


@dataclass
class _Noise:
    """Squared norms of an output, and of its errors."""

    signal: float = 0.0
    exact: list[float] = field(default_factory=list[float])
    """Errors of the graph, per sample."""
    simulated: list[float] = field(default_factory=list[float])
    """Errors of the graph, including the runtime's rounding of layer inputs."""
    artifact: list[float] = field(default_factory=list[float])

    @classmethod
    def of_all(cls, noises: Iterable[_Noise]) -> _Noise:
        """Return the sums over all outputs of the same samples."""
        every = [*noises]
        missed = (
            [float(sum(parts)) for parts in zip(*lists, strict=True)]
            for lists in ([n.exact for n in every], [n.simulated for n in every], [n.artifact for n in every])
        )
        return cls(sum(n.signal for n in every), *missed)

    def add(self, wanted: Tensor, exact: Tensor, simulated: Tensor, found: Tensor, samples: int) -> None:
        """Add one more batch with the given number of samples."""
        self.signal += energy(wanted)
        self.exact += missed_by_sample(exact, wanted, samples)
        self.simulated += missed_by_sample(simulated, wanted, samples)
        self.artifact += missed_by_sample(found, wanted, samples)

    @property
    def by_graph(self) -> float:
        """SQNR of the graph, in dB."""
        return decibels(self.signal, sum(self.simulated))

    @property
    def by_artifact(self) -> float:
        """SQNR of the artifact, in dB."""
        return decibels(self.signal, sum(self.artifact))

    def is_beyond_chance(self, margin: float) -> bool:
        """Whether the artifact would exceed the margin on other samples too, as far as the scatter of these shows."""
        allowed = 10 ** (margin / 10)
        pairs = zip(self.artifact, self.simulated, strict=True)
        excess = torch.tensor([found - allowed * planned for found, planned in pairs], dtype=torch.float64)
        if len(excess) < 2:  # too few to estimate the scatter
            return True
        return bool(excess.mean() > SCATTER * excess.std() / len(excess) ** 0.5)


def _has_halves(graph: Graph) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(v.type.dtype in halves for node in graph.nodes for v in node.outputs)


def _rounding_layers(graph: Graph, target: Target) -> dict[Node, int]:
    """Return the layers with inputs that the target rounds on multiplication, and the number of elements per scale."""
    scheme = scheme_of(target)
    return rounding_layers(graph, scheme.weights_only) if scheme and scheme.weights_only else {}
