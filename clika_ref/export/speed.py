"""Compare the speed of an artifact with that of the float model, to find out whether quantization made it faster."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.compiled.latency import MIN_DIFFERENCE, time_in_turns
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import format_count
from clika_ref.core.ir import Graph
from clika_ref.core.targets import Target

MIN_PAIRS = 5
"""Minimum number of pairs of times for a verdict."""

MAX_SECONDS = 1.0
"""Maximum number of seconds for the pairs of one number of threads."""

SHOWN_NODES = 3
"""Number of nodes to name if the artifact is not faster."""


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
        """Whether the artifact is faster; None if there are too few pairs, or the middle halves of times overlap."""
        if len(self.seconds) < MIN_PAIRS:
            return None
        own, other = _middle_half(self.seconds), _middle_half(self.float_seconds)
        if own[1] < other[0]:
            return True
        return False if own[0] > other[1] and self.ratio > 1 + MIN_DIFFERENCE else None

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


def advise(target: Target, graph: Graph, artifact: Artifact, inputs: Sequence[Tensor]) -> str:
    """Return the nodes of an artifact that take most time, and what to do about them.

    Args:
        target: the target that runs it.
        graph: the graph that it was written from.
        artifact: the artifact.
        inputs: one tensor for each input.
    """
    seconds = target.profile(artifact, inputs) if target.has_node_times() else {}
    slowest = _name_slowest_nodes(graph, seconds)
    where = f" Most time goes to {', '.join(slowest)}." if slowest else ""
    return (
        f"{where} Compile with optimize_for='latency', which times whole plans on this machine, or give "
        "skip_quantization for them in layer_quantization_settings. clika_explain() shows the precision of each node."
    )


def _name_slowest_nodes(graph: Graph, seconds: Mapping[str, float]) -> list[str]:
    """Return the nodes that take most time, with their share of it."""
    scopes = {node.name: node.origin.scope for node in graph.nodes}
    total = sum(seconds.values())
    slowest = sorted((name for name in seconds if name), key=lambda name: -seconds[name])[:SHOWN_NODES]
    return [f"{scopes.get(name) or name} ({seconds[name] / total:.0%})" for name in slowest]
