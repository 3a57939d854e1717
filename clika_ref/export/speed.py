"""Compare the speed of an artifact with that of the float model, to find out whether quantization made it faster."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clika_ref.compiled.latency import MIN_DIFFERENCE, time_in_turns
from clika_ref.compiled.runners import compile_temporarily
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, format_count
from clika_ref.core.ir import Graph, Node
from clika_ref.core.targets import Target
from clika_ref.quantization.qdq.insertion import QDQ_OPERATORS
from clika_ref.reporting.log import CompilationLog

MIN_PAIRS = 5
"""Minimum number of pairs of times for a verdict."""

MAX_SECONDS = 1.0
"""Maximum number of seconds for the pairs of one number of threads."""

SHOWN_NODES = 3
"""Number of nodes to name if the artifact is not faster."""

CONVERSIONS_NAME = "quantize and dequantize nodes"

SPEED_ADVICE = (
    "Compile with optimize_for='latency', which times whole plans on this machine, or give skip_quantization for them "
    "in layer_quantization_settings. clika_explain() shows the precision of each node."
)


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """Times of an artifact and of the float model, measured in turns with one number of threads."""

    threads: int
    seconds: Sequence[float]
    """Seconds of a call of the artifact, one for each pair."""
    float_seconds: Sequence[float]
    """Seconds of a call of the float model."""

    @property
    def ratio(self) -> float:
        """Ratio of the median times, below 1 if the artifact is faster."""
        return statistics.median(self.seconds) / statistics.median(self.float_seconds)

    @property
    def is_faster(self) -> bool | None:
        """Whether the artifact is faster; None if there are too few pairs, or no clear difference.

        The middle halves of the times must not overlap, and the medians must differ by `MIN_DIFFERENCE`.
        """
        if len(self.seconds) < MIN_PAIRS:
            return None
        own, other = _middle_half(self.seconds), _middle_half(self.float_seconds)
        is_apart = own[1] < other[0] or own[0] > other[1]
        return self.ratio < 1 if is_apart and abs(self.ratio - 1) > MIN_DIFFERENCE else None

    def __str__(self) -> str:
        where = f"on {format_count(self.threads, 'thread')}"
        if self.is_faster is not None:
            return f"{self.ratio:.2f}x the time of float {where}"
        count = len(self.seconds)
        why = f"{format_count(count, 'pair')} in {MAX_SECONDS:g} s" if count < MIN_PAIRS else "no clear difference"
        return f"unknown {where}: {why} ({self.ratio:.2f}x)"


def _middle_half(times: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def can_time(target: Target) -> bool:
    """Return whether times of a target can be measured here: its own runtime is installed, and none emulates it."""
    return not target.emulated_by and target.unavailable_reason() is None


def compare_speed(
    target: Target, artifact: Artifact, in_float: Artifact, inputs: Sequence[Tensor]
) -> list[SpeedComparison]:
    """Time an artifact and the float model in turns: on one thread, and on the threads of this process.

    Args:
        target: the target that runs both.
        artifact: the quantized artifact.
        in_float: the same model, not quantized.
        inputs: one tensor for each input.

    Raises:
        TargetError: the runtime rejects an artifact, or fails.
    """
    found: list[SpeedComparison] = []
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        with use_threads(threads):
            runners = target.load(artifact), target.load(in_float)
            pairs = time_in_turns(runners[0], inputs, runners[1], inputs, max_seconds=MAX_SECONDS)
        found.append(SpeedComparison(threads, *zip(*pairs, strict=True)))
    return found


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use a number of threads within the block, also in runtimes that are loaded there."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_speed(
    artifact: Artifact,
    graph: Graph,
    target: Target,
    inputs: Sequence[Tensor],
    log: CompilationLog,
    *,
    make_plain: Callable[[], Graph],
) -> Artifact:
    """Time an artifact and the float model; return it with the times, and warn if it is slower.

    The artifact is already verified. An error, such as of a float model that is too large for a file, changes nothing.

    Args:
        artifact: the quantized artifact.
        graph: the graph that it was written from.
        target: the target that runs both.
        inputs: one tensor for each input.
        log: receives the times.
        make_plain: returns the graph as lowered for the target without quantization.
    """
    with log.stage("Timing") as stage:
        try:
            with compile_temporarily(make_plain(), target) as in_float:
                found = compare_speed(target, artifact, in_float, inputs)
        except ClikaError as error:
            stage.done(f"not timed: {error}")
            return artifact
        times = ", ".join(map(str, found))
        stage.done(times)
    if any(each.is_faster is False for each in found):
        slowest = _name_slowest_nodes(graph, _profile(target, artifact, inputs))
        shown = f" Most time goes to {', '.join(slowest)}." if slowest else ""
        log.warning(f"{artifact.path.name} is slower than float in {target.name}: {times}.{shown} {SPEED_ADVICE}")
    return replace(artifact, facts={**artifact.facts, "speed": found})


def _profile(target: Target, artifact: Artifact, inputs: Sequence[Tensor]) -> Mapping[str, float]:
    """Return the seconds of each node; empty if the runtime cannot profile the artifact."""
    try:
        return target.profile(artifact, inputs) if target.has_node_times() else {}
    except ClikaError:
        return {}


def _name_slowest_nodes(graph: Graph, seconds: Mapping[str, float]) -> list[str]:
    """Return the nodes that take most time, with their share of it; quantize and dequantize nodes count as one."""
    names = {node.name: _name_node(node) for node in graph.nodes}
    by_name = defaultdict[str, float](float)
    for name, spent in seconds.items():
        by_name[names.get(name, name)] += spent
    total, slowest = sum(by_name.values()), sorted(filter(None, by_name), key=lambda name: -by_name[name])
    return [f"{name} ({by_name[name] / total:.0%})" for name in slowest[:SHOWN_NODES]]


def _name_node(node: Node) -> str:
    return CONVERSIONS_NAME if node.op_type in QDQ_OPERATORS else node.origin.scope or node.name
