"""Compare a quantized artifact with the simulation of its graph: it may not lose more of the float model's signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clika_ref.compiled.runners import load_runner
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import DisagreementError, format_count
from clika_ref.core.ir import Graph, walk
from clika_ref.core.targets import Target
from clika_ref.export.input_rounding import find_rounding_layers, run_with_rounded_inputs
from clika_ref.export.layer_check import describe_first_broken_layer
from clika_ref.quantization.algorithms.sqnr import sum_squared_error_by_sample, sum_squares
from clika_ref.quantization.calibration.calibrator import sample_count
from clika_ref.quantization.decision import ratio_in_decibels
from clika_ref.quantization.graph_runs import run_graph

MARGIN_DB = 0.5
"""Decibels that an artifact may lose against the simulation: rounding differs, and accumulates with depth."""

MIN_MARGIN_SAMPLES = 16
"""Minimum number of samples for that margin; with fewer, a single rounding may matter more."""

WIDE_MARGIN_DB = 3.0
"""The margin for fewer samples, and for FP16/BF16, where a node lowered to several operators rounds more often."""

MAX_STANDARD_ERRORS = 2.0
"""Standard errors of the mean up to which a difference may be due to the chosen samples.

In an ill-conditioned model, each rounding changes all later results: the errors of an artifact and its graph are then
similar on average, but differ from sample to sample.
"""

FLOAT_ROUNDING_DB = 100.0
"""SQNR above which the difference to the float model is due to float rounding alone.

An output without quantized nodes before it has no error in the graph, and a few float roundings in a runtime
(`artifact_check.ROUNDING_TOLERANCE`: 84 dB).
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
    problem = target.unavailable_reason()
    if problem is not None:
        return f"not compared: {problem}"
    if any(node.is_random for node in walk(graph)):
        return "not compared: the model draws random numbers"
    noises = _measure_noise(artifact, target, graph, examples, expected)
    total, samples = _Noise.of_all(noises.values()), sum(map(sample_count, examples))
    is_narrow = samples >= MIN_MARGIN_SAMPLES and not _has_fp16(graph) and total.is_beyond_chance(MARGIN_DB)
    margin = MARGIN_DB if is_narrow else WIDE_MARGIN_DB
    problems = [_describe_excess_noise(total, margin)]
    problems += [
        f"{alone} for output {name!r}"
        for name, noise in noises.items()
        if (alone := _describe_excess_noise(noise, WIDE_MARGIN_DB))
    ]
    problem = next(filter(None, problems), "")
    if problem:
        raise DisagreementError(
            f"cannot verify the artifact: {target.describe_runtime()} reaches {problem}, over "
            f"{format_count(samples, 'sample')}. "
            f"{describe_first_broken_layer(target, graph, examples[0])}. The file was not moved into place. "
            "Compile with compare_after_export=False to inspect it."
        )
    report = (
        f"{total.artifact_db:.1f} dB over {format_count(samples, 'sample')} in {target.describe_runtime()}, simulated "
        f"{total.graph_db:.1f} dB"
    )
    unrounded = f", {ratio_in_decibels(total.signal, sum(total.exact)):.1f} dB without rounding of layer inputs"
    return report + unrounded * (total.simulated != total.exact)


def _describe_excess_noise(noise: _Noise, margin: float) -> str:
    """Describe the SQNR of an artifact if it is below that of its graph by more than a margin, empty otherwise."""
    if noise.artifact_db >= min(noise.graph_db - margin, FLOAT_ROUNDING_DB):
        return ""
    return f"{noise.artifact_db:.1f} dB, but its simulation {noise.graph_db:.1f} dB"


def _measure_noise(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[Tensor]],
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> dict[str, _Noise]:
    """Return the errors of each float output, by its name, over all examples."""
    runner, graph = load_runner(target, artifact), _compute_constants(graph)
    rounding = find_rounding_layers(graph, target.scheme)
    noises = {i: _Noise() for i, v in enumerate(graph.outputs) if v.type.dtype.is_floating_point}
    for inputs in examples:
        reference = expected(inputs)
        with torch.no_grad():
            exact = run_graph(graph, inputs)
        simulated = run_with_rounded_inputs(graph, inputs, rounding) if rounding else exact
        found = runner(inputs)
        samples = _count_samples([reference[i] for i in noises], sample_count(inputs))
        for i, noise in noises.items():
            noise.add(reference[i], exact[i], simulated[i], found[i], samples)
    return {f"{i}, {graph.outputs[i].name}": noise for i, noise in noises.items()}


def _compute_constants(graph: Graph) -> Graph:
    """Return a clone whose deferred constants are computed: otherwise each run quantizes all weights again."""
    clone = graph.clone()
    for value in clone.constants.values():
        value.data = value.data
    return clone


def _count_samples(outputs: Sequence[Tensor], count: int) -> int:
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

    def add(self, reference: Tensor, exact: Tensor, simulated: Tensor, found: Tensor, samples: int) -> None:
        """Add one more batch with the given number of samples."""
        self.signal += sum_squares(reference)
        self.exact += sum_squared_error_by_sample(exact, reference, samples)
        self.simulated += sum_squared_error_by_sample(simulated, reference, samples)
        self.artifact += sum_squared_error_by_sample(found, reference, samples)

    @property
    def graph_db(self) -> float:
        """SQNR of the graph, in dB."""
        return ratio_in_decibels(self.signal, sum(self.simulated))

    @property
    def artifact_db(self) -> float:
        """SQNR of the artifact, in dB."""
        return ratio_in_decibels(self.signal, sum(self.artifact))

    def is_beyond_chance(self, margin: float) -> bool:
        """Whether the artifact would exceed the margin on other samples too, as far as the scatter of these shows."""
        allowed = 10 ** (margin / 10)
        pairs = zip(self.artifact, self.simulated, strict=True)
        excess = torch.tensor([found - allowed * planned for found, planned in pairs], dtype=torch.float64)
        if len(excess) < 2:  # too few to estimate the scatter
            return True
        return bool(excess.mean() > MAX_STANDARD_ERRORS * excess.std() / len(excess) ** 0.5)


def _has_fp16(graph: Graph) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return any(v.type.dtype in halves for node in walk(graph) for v in node.outputs)
