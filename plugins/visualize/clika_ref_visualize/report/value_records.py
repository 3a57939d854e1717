"""Records of activations: their observed ranges, and the ranges that their quantization represents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.calibration.calibrator import is_move_of_observed_value
from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN
from clika_ref.quantization.calibration.histogram import Histogram as FullHistogram
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.calibration.statistics import Statistics
from clika_ref.quantization.qdq.insertion import QDQ_OPERATORS, Plan
from clika_ref.quantization.qdq.qparams import QParams
from clika_ref_visualize.report.contents import HistogramRecord, ObservedRange, QuantizedRange, ValueRecord

MAX_BINS = 64
"""Maximum histogram bins in a report: as many as are distinguishable in the width of a panel."""


def trace_before_pairs(value: Value) -> Value:
    """Return the float value before quantize and dequantize nodes, or the value itself if it is not quantized."""
    while value.producer is not None and value.producer.op_type in QDQ_OPERATORS:
        value = value.producer.inputs[0]
    return value


def list_computing_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of a graph in order, except quantize and dequantize nodes."""
    return [node for node in graph.nodes if node.op_type not in QDQ_OPERATORS]


def build_value_records(
    graph: Graph, plan: Plan | None, table: RangeTable | None, observers: Mapping[str, str]
) -> dict[Value, ValueRecord]:
    """Return a record for each input of a graph and each output of its nodes, in order.

    Args:
        graph: the lowered graph.
        plan: the quantization plan of the graph; None for a float one.
        table: observed ranges; None if unknown.
        observers: observers that chose the ranges, by value name, as far as known.
    """
    records: dict[Value, ValueRecord] = {}
    for producer, value in _iterate_values(graph):
        statistics, source = _find_statistics(value, table)
        scale = plan.activations.get(value.name) if plan else None
        quantized = None
        if plan is not None and scale is not None:
            quantized = _make_quantized_range(scale, plan.scheme.activations, statistics, observers.get(value.name, ""))
        observed = (
            None if statistics is None else _make_observed_range(statistics, "" if source is value else source.name)
        )
        records[value] = ValueRecord(value.name, str(value.type), producer, observed, quantized)
    return records


def _iterate_values(graph: Graph) -> Iterator[tuple[int | None, Value]]:
    for value in graph.inputs:
        yield None, value
    for index, node in enumerate(list_computing_nodes(graph)):
        for value in node.outputs:
            yield index, value


def _find_statistics(value: Value, table: RangeTable | None) -> tuple[Statistics | None, Value]:
    """Return the statistics of a value, or of the value that it reorders, and that value."""
    source = value
    while table is not None:
        statistics = table.values.get(source.name)
        if statistics is not None:
            return (None if statistics.is_empty else statistics), source
        if source.producer is None or not is_move_of_observed_value(source.producer):
            break
        source = trace_before_pairs(source.producer.first_tensor)
    return None, value


def _make_observed_range(statistics: Statistics, source: str) -> ObservedRange:
    return ObservedRange(statistics.low, statistics.high, statistics.batches, merge_bins(statistics.histogram), source)


def _make_quantized_range(
    qparams: QParams, dtype: QuantizedType, statistics: Statistics | None, observer: str
) -> QuantizedRange:
    low, high = ((limit - qparams.zero_point) * qparams.scale for limit in (dtype.low, dtype.high))
    levels = dtype.high - dtype.low + 1
    clipped_share = None
    if statistics is not None and statistics.histogram.total:
        centers, half = statistics.histogram.centers, qparams.scale / 2  # closer elements are rounded, not clipped
        beyond = (centers < low - half) | (centers > high + half)
        clipped_share = float(statistics.histogram.counts[beyond].sum()) / statistics.histogram.total
    return QuantizedRange(low, high, qparams.scale, qparams.zero_point, levels, observer, clipped_share)


def merge_bins(full: FullHistogram) -> HistogramRecord:
    """Return a histogram with at most `MAX_BINS` bins, made by merging neighbors between the first and last element.

    Zero stays a bin boundary, as in the full histogram.
    """
    used = full.counts.nonzero().squeeze(1)
    if not len(used):
        return HistogramRecord(0.0, full.width, [])
    first, last = int(used[0]) - BINS_PER_SIGN, int(used[-1]) - BINS_PER_SIGN
    times = 1
    while last // times - first // times >= MAX_BINS:
        times += 1
    counts = [0] * (last // times - first // times + 1)
    for index in used.tolist():
        counts[(index - BINS_PER_SIGN) // times - first // times] += int(full.counts[index])
    return HistogramRecord(first // times * times * full.width, times * full.width, counts)
