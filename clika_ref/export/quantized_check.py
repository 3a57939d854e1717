"""Compare a quantized artifact with the simulation of its graph: it may not lose more of the float model's signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from clika_ref.capture.detections import is_data_dependent, list_row_groups, pair_rows
from clika_ref.compiled.runners import load_runner
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import DisagreementError, format_count
from clika_ref.core.ir import Graph, walk
from clika_ref.core.targets import Target
from clika_ref.export.input_rounding import find_rounding_layers, run_with_rounded_inputs
from clika_ref.export.layer_check import describe_first_broken_layer
from clika_ref.quantization.algorithms.compared_outputs import OutputBranches
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
    dynamic = [v.name for v in graph.outputs if any(is_data_dependent(graph, size) for size in v.type.shape[1:])]
    if dynamic:
        return f"not compared: the data determines more than the number of rows of {', '.join(map(repr, dynamic))}"
    noises = _measure_noise(artifact, target, graph, examples, expected)
    total, samples = _Noise.of_all(noises.values()), _count_all_samples(graph, examples)
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


def _count_all_samples(graph: Graph, examples: Sequence[Sequence[Tensor]]) -> int:
    """Return the number of samples; each call of a detector counts once, as its images may be inputs of their own."""
    return len(examples) if list_row_groups(graph) else sum(map(sample_count, examples))


def _describe_excess_noise(noise: _Noise, margin: float) -> str:
    """Describe the SQNR of an artifact if it is below that of its graph by more than a margin, empty otherwise."""
    if noise.artifact_db >= min(noise.graph_db - margin, FLOAT_ROUNDING_DB):
        return ""
    if noise.is_selected and not noise.is_beyond_chance(margin):
        return ""
    return f"{noise.artifact_db:.1f} dB, but its simulation {noise.graph_db:.1f} dB"


def _measure_noise(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[Tensor]],
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> dict[str, _Noise]:
    """Return the errors of each part of a float output, by its name, over all examples."""
    runner, graph = load_runner(target, artifact), _compute_constants(graph)
    rounding, pairing = find_rounding_layers(graph, target.scheme), _OutputPairing(graph)
    noises = {name: _Noise(is_selected=name in pairing.selected_names) for name in pairing.names}
    for inputs in examples:
        reference = expected(inputs)
        with torch.no_grad():
            exact = run_graph(graph, inputs)
        simulated = run_with_rounded_inputs(graph, inputs, rounding) if rounding else exact
        found = runner(inputs)
        samples = pairing.count_samples(reference, sample_count(inputs))
        every = [pairing.pair(results, reference) for results in (exact, simulated, found)]
        for noise, own_exact, own_simulated, own_found in zip(noises.values(), *every, strict=True):
            noise.add(own_exact, own_simulated, own_found, samples)
    return noises


def _compute_constants(graph: Graph) -> Graph:
    """Return a clone whose deferred constants are computed: otherwise each run quantizes all weights again."""
    clone = graph.clone()
    for value in clone.constants.values():
        value.data = value.data
    return clone


class _OutputPairing:
    """Pairs the parts of two results of a graph: branches of outputs, and outputs with matched detections."""

    def __init__(self, graph: Graph) -> None:
        self._groups = list_row_groups(graph)
        in_group = {i for group in self._groups for i in group}
        self._fixed = [i for i in _list_floats(graph) if i not in in_group]
        self._selected = [[i for i in _list_floats(graph) if i in group] for group in self._groups]
        self._branches = OutputBranches([graph.outputs[i] for i in self._fixed])
        branches = [f"{i}, {name}" for i in self._fixed for name in OutputBranches([graph.outputs[i]]).names]
        self.selected_names = [f"{i}, {graph.outputs[i].name}" for own in self._selected for i in own]
        """The names of outputs with matched detections."""
        self.names = [*branches, *self.selected_names]
        """A name for each part."""

    def pair(self, found: Sequence[Tensor], reference: Sequence[Tensor]) -> list[_Pair]:
        """Return the tensors of both for each name, in equal shapes, from all outputs."""
        branches = (self._branches.split([results[i] for i in self._fixed]) for results in (found, reference))
        pairs = [*zip(*branches, strict=True)]
        for group, own in zip(self._groups, self._selected, strict=True):
            rows = pair_rows([found[i] for i in group], [reference[i] for i in group])
            pairs += [rows[group.index(i)] for i in own]
        return pairs

    def count_samples(self, outputs: Sequence[Tensor], count: int) -> int:
        """Return the number of samples along the first dim of the outputs; 1 if an output cannot be split."""
        if self._groups:
            return 1
        return count if count and all(x.ndim and x.shape[0] == count for x in (outputs[i] for i in self._fixed)) else 1


def _list_floats(graph: Graph) -> list[int]:
    return [i for i, v in enumerate(graph.outputs) if v.type.dtype.is_floating_point]


_Pair: TypeAlias = tuple[Tensor, Tensor]
"""A part of a result, and the same part of the float model's."""


@dataclass
class _Noise:
    """Squared norms of an output, and of its errors."""

    signal: float = 0.0
    exact: list[float] = field(default_factory=list[float])
    """Errors of the graph, per sample."""
    simulated: list[float] = field(default_factory=list[float])
    """Errors of the graph, including the runtime's rounding of layer inputs."""
    artifact: list[float] = field(default_factory=list[float])
    is_selected: bool = False
    """Whether the data selects the rows: a rounding that changes the selection then counts as much as a whole row."""

    @classmethod
    def of_all(cls, noises: Iterable[_Noise]) -> _Noise:
        """Return the sums over all outputs of the same samples."""
        every = [*noises]
        missed = (
            [float(sum(parts)) for parts in zip(*lists, strict=True)]
            for lists in ([n.exact for n in every], [n.simulated for n in every], [n.artifact for n in every])
        )
        return cls(sum(n.signal for n in every), *missed, is_selected=any(n.is_selected for n in every))

    def add(self, exact: _Pair, simulated: _Pair, found: _Pair, samples: int) -> None:
        """Add one more batch with the given number of samples; each pair ends with the reference."""
        self.signal += sum_squares(exact[1])
        self.exact += sum_squared_error_by_sample(*exact, samples)
        self.simulated += sum_squared_error_by_sample(*simulated, samples)
        self.artifact += sum_squared_error_by_sample(*found, samples)

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
