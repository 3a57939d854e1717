"""Records of values: their observed ranges, and the ranges that their quantization covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.explanation import PAIR
from clika_ref.quantization.calibration import moves_what_was_seen
from clika_ref.quantization.histogram import BINS
from clika_ref.quantization.histogram import Histogram as FullHistogram
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.scales import Scale
from clika_ref.quantization.statistics import Statistics
from clika_ref.quantization_scheme import Integers
from clika_ref.report.contents import Covered, Histogram, Seen, ValueRecord

MOST_BINS = 64
"""Maximum histogram bins in a report: as many as are distinguishable in the width of a panel."""


def before_integers(value: Value) -> Value:
    """Return the float value before quantize and dequantize nodes, or the value itself if it is not quantized."""
    while value.producer is not None and value.producer.kind in PAIR:
        value = value.producer.inputs[0]
    return value


def computed_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of a graph in order, except quantize and dequantize nodes."""
    return [node for node in graph.nodes if node.kind not in PAIR]


def value_records(
    graph: Graph, plan: Plan | None, table: RangeTable | None, observers: Mapping[str, str]
) -> dict[Value, ValueRecord]:
    """Return a record for each input of a graph and each output of its nodes, in order.

    Args:
        graph: the lowered graph.
        plan: the quantization plan of the graph; None for a float one.
        table: observed ranges; None if unknown.
        observers: observers that chose the ranges, by value name, as far as known.
    """
    found: dict[Value, ValueRecord] = {}
    for maker, value in _values(graph):
        statistics, source = _statistics(value, table)
        scale = plan.activations.get(value.name) if plan else None
        covered = None
        if plan is not None and scale is not None:
            covered = _covered(scale, plan.scheme.activations, statistics, observers.get(value.name, ""))
        seen = None if statistics is None else _seen(statistics, "" if source is value else source.name)
        found[value] = ValueRecord(value.name, str(value.type), maker, seen, covered)
    return found


def _values(graph: Graph) -> Iterator[tuple[int | None, Value]]:
    for value in graph.inputs:
        yield None, value
    for place, node in enumerate(computed_nodes(graph)):
        for value in node.outputs:
            yield place, value


def _statistics(value: Value, table: RangeTable | None) -> tuple[Statistics | None, Value]:
    """Return the statistics of a value, or of the value that it reorders, and that value."""
    source = value
    while table is not None:
        found = table.values.get(source.name)
        if found is not None:
            return (None if found.is_empty else found), source
        if source.producer is None or not moves_what_was_seen(source.producer):
            break
        source = before_integers(next(v for v in source.producer.inputs if isinstance(v, Value)))
    return None, value


def _seen(statistics: Statistics, source: str) -> Seen:
    return Seen(statistics.low, statistics.high, statistics.batches, joined(statistics.histogram), source)


def _covered(scale: Scale, kind: Integers, statistics: Statistics | None, observer: str) -> Covered:
    low, high = ((end - scale.zero_point) * scale.scale for end in (kind.low, kind.high))
    levels = kind.high - kind.low + 1
    outside = None
    if statistics is not None and statistics.histogram.total:
        centers, half = statistics.histogram.centers, scale.scale / 2  # closer elements are rounded, not clipped
        beyond = (centers < low - half) | (centers > high + half)
        outside = float(statistics.histogram.counts[beyond].sum()) / statistics.histogram.total
    return Covered(low, high, scale.scale, scale.zero_point, levels, observer, outside)


def joined(full: FullHistogram) -> Histogram:
    """Return a histogram with at most `MOST_BINS` bins, made by merging neighbors between the first and last element.

    Zero stays a bin boundary, as in the full histogram.
    """
    seen = full.counts.nonzero().squeeze(1)
    if not len(seen):
        return Histogram(0.0, full.width, [])
    first, last = int(seen[0]) - BINS, int(seen[-1]) - BINS
    times = 1
    while last // times - first // times >= MOST_BINS:
        times += 1
    counts = [0] * (last // times - first // times + 1)
    for place in seen.tolist():
        counts[(place - BINS) // times - first // times] += int(full.counts[place])
    return Histogram(first // times * times * full.width, times * full.width, counts)
