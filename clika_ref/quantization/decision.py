"""The quantization of each layer of a graph, and the predicted result at other thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clika_ref.core.ir import Graph, Node, Value, walk
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.traits import LOOKUP
from clika_ref.quantization.algorithms.recurrent import RecurrentResult
from clika_ref.quantization.algorithms.sensitivity import JointErrorTerm, LayerErrorTerms, sum_layer_errors
from clika_ref.quantization.algorithms.weight_only import WeightOnlyResult
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import matrices_of, weight_position_of
from clika_ref.quantization.qdq.placement import Placement
from clika_ref.quantization.qdq.recurrent_layers import find_input_block
from clika_ref.reporting.tables import HasTables, Table
from clika_ref.settings.quantization import INT8_BITS

FLOAT32_BITS = 32


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A row of the summary: the decision for one layer, and the reason."""

    name: str
    """Name of the node in the graph."""
    scope: str
    """Path of its module."""
    operator: str
    """Name of its operator."""
    sensitivity: float | None
    """None if it was not estimated: no target can quantize the layer, the user skips it, or it has no gain in INT8."""
    reason: str
    """Reason to keep it in float; empty if the layer or its weight is quantized."""
    widths: tuple[int, int]
    """Bits of its weight and its input in quantized form."""
    bytes_before: int
    """Bytes of its weight before quantization."""
    bytes_quantized: int
    """Bytes of its weight in quantized form."""
    note: str = ""
    """Reason for a larger width than requested."""

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of its weight and its input, as decided."""
        return (FLOAT32_BITS, FLOAT32_BITS) if self.reason else self.widths

    @property
    def decision(self) -> str:
        """The decision with its reason, as the table shows it."""
        return f"float: {self.reason}" if self.reason else ": ".join(filter(None, ("quantized", self.note)))

    @property
    def bytes_after(self) -> int:
        """Bytes of its weight, as decided."""
        return self.bytes_before if self.reason else self.bytes_quantized


@dataclass(frozen=True, slots=True)
class ThresholdPrediction:
    """Predicted result at another threshold."""

    threshold: float
    """Share of the outputs' squared norm that one layer may change: ``quantization_sensitivity_threshold``."""
    layers: int
    """Number of quantized layers."""
    bytes: int
    """Bytes of all weights and constants. Nodes and scales, some percent of a small file, are not counted."""
    sqnr: float
    """Predicted SQNR in dB of the varying part of the outputs; inf if nothing is quantized, -inf if nothing varies."""


def format_decibels(ratio: float) -> str:
    """Format a ratio in dB for tables; infinite ones are explained.

    >>> format_decibels(31.04), format_decibels(math.inf), format_decibels(-math.inf)
    ('31.0 dB', 'exact', 'none: outputs are constant')
    """
    named = {math.inf: "exact", -math.inf: "none: outputs are constant"}
    return named.get(ratio, f"{ratio:.1f} dB")


LAYER_COLUMNS: Mapping[str, Callable[[LayerReport], object]] = {
    "layer": lambda layer: layer.scope or layer.name,
    "operator": lambda layer: layer.operator,
    "weights": lambda layer: layer.bits[0],
    "activations": lambda layer: layer.bits[1],
    "QS": lambda layer: layer.sensitivity,
    "bytes": lambda layer: layer.bytes_before,
    "bytes after": lambda layer: layer.bytes_after,
    "decision": lambda layer: layer.decision,
}
"""Columns of the table of layers: widths in bits, QS for quantization sensitivity."""

THRESHOLD_COLUMNS: Mapping[str, Callable[[ThresholdPrediction], object]] = {
    "threshold": lambda row: row.threshold,
    "layers": lambda row: row.layers,
    "file bytes": lambda row: row.bytes,
    "predicted SQNR": lambda row: format_decibels(row.sqnr),
}

THRESHOLD_TABLE_TITLE = "Predictions for other values of quantization_sensitivity_threshold"


@dataclass(frozen=True, slots=True, repr=False)
class Quantization(HasTables):
    """Quantization of a graph for a target; prints as a table of its layers and one of other thresholds."""

    plan: Plan
    """Scales by value and layer name."""
    layers: Sequence[LayerReport]
    """One row for each layer."""
    what_if: Sequence[ThresholdPrediction]
    """One row for each threshold at which one more layer is quantized, in ascending order."""
    observer: str
    """Observer that chose the activation ranges; empty for weight-only quantization."""
    bytes: int
    """Bytes of the file, counted as in `ThresholdPrediction`."""
    kept_in_float: Sequence[str] = ()
    """Layers kept in float at any threshold, since they cost little and cause much of the error."""
    observers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Observer of each quantized value, by value name."""

    @property
    def table(self) -> Table[LayerReport]:
        """The decision for each layer, in order."""
        return Table(self.layers, LAYER_COLUMNS)

    @property
    def prediction_table(self) -> Table[ThresholdPrediction]:
        """The predicted result at each threshold at which one more layer is quantized."""
        return Table(self.what_if, THRESHOLD_COLUMNS)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return both tables, with a heading between them."""
        return self.table, "", f"{THRESHOLD_TABLE_TITLE}:", self.prediction_table

    def summarize(self) -> str:
        """Return a summary: the number of quantized layers, the size reduction, and the algorithms used."""
        layers = self.layers
        count = sum(not layer.reason for layer in layers)
        before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
        unit, name = (1e6, "MB") if before >= 1e6 else (1e3, "KB")
        sizes = f"{before / unit:,.1f} -> {after / unit:,.1f} {name}"
        if not self.observer:
            return f"Quantized the weights of {count:,}/{len(layers):,} layers, {sizes}"
        algorithms = [self.observer]
        algorithms += [f"GPTQ for {len(self.plan.offsets)}"] if self.plan.offsets else []
        algorithms += ["bias correction"] if self.plan.corrections else []
        return f"Quantized {count:,}/{len(layers):,} layers, weights {sizes} ({', '.join(algorithms)})"


def merge_quantizations(whole: Quantization, body: Quantization, graph: Graph) -> Quantization:
    """Return the quantization of a graph with that of one of its bodies.

    Predictions for other thresholds are those of the graph, or those of the body if the graph itself has no layers.
    """
    layers = [*whole.layers, *body.layers]
    return Quantization(
        whole.plan.merge(body.plan),
        layers,
        whole.what_if or body.what_if,
        ", ".join(dict.fromkeys(filter(None, (whole.observer, body.observer)))),
        count_file_bytes(graph.root, layers),
        [*whole.kept_in_float, *body.kept_in_float],
        {**whole.observers, **body.observers},
    )


def layer_reports(
    placement: Placement, sensitivities: Mapping[Node, float], scheme: QuantizationScheme
) -> list[LayerReport]:
    """Return a row for each layer: first the quantized layers, then those in float, each in graph order."""
    widths = scheme.weights.bits, scheme.activations.bits
    return [
        _report_layer(node, sensitivities, placement.floats, widths, _weight_elements(node))
        for node in (*placement.layers, *placement.floats)
    ]


def _report_layer(
    node: Node,
    sensitivities: Mapping[Node, float],
    floats: Mapping[Node, str],
    widths: tuple[int, int],
    bytes_quantized: int,
) -> LayerReport:
    facts = node.name, node.origin.scope, node.op_type, sensitivities.get(node), floats.get(node, "")
    return LayerReport(*facts, widths, _weight_bytes(node), bytes_quantized)


def recurrent_reports(found: RecurrentResult, scheme: QuantizationScheme) -> list[LayerReport]:
    """Return a row for each quantized recurrent layer."""
    return [
        _report_layer(
            node,
            found.sensitivities,
            {},
            (scheme.weights.bits, scheme.activations.bits if is_dynamic else FLOAT32_BITS),
            sum(v.type.element_count + FLOAT32_BITS // 8 * int(v.type.shape[0]) for v in matrices_of(node)),
        )
        for node, is_dynamic in found.quantized.items()
    ]


def summarize_weight_only(
    graph: Graph, scheme: QuantizationScheme, found: WeightOnlyResult, recurrent: RecurrentResult, *, is_dynamic: bool
) -> Quantization:
    """Return the result of weight-only quantization.

    Args:
        graph: lowered.
        scheme: of the target.
        found: the result for layers and lookups.
        recurrent: the result for recurrent layers.
        is_dynamic: whether layers also round their inputs at run time.
    """
    found = replace(
        found,
        floats=recurrent.replace_floats(found.floats),
        sensitivities={**found.sensitivities, **recurrent.sensitivities},
    )
    plan = Plan(scheme)
    plan.packed_weights = {node.name: packed for node, packed in found.packed.items()} | recurrent.matrices
    plan.dynamic = {node.name: rounds_inputs for node, rounds_inputs in recurrent.quantized.items()}
    rounding = [node.name for node in found.packed if node.op.trait is not LOOKUP] if is_dynamic else []
    if size := find_input_block(scheme):
        plan.rounded_inputs = dict.fromkeys(rounding, size)
    else:
        plan.dynamic |= dict.fromkeys(rounding, True)
    plan.floats = {node.name: reason for node, reason in found.floats.items()}
    reports = [*recurrent_reports(recurrent, scheme), *weight_only_reports(graph, found, is_dynamic=is_dynamic)]
    parts = {node.name: LayerErrorTerms(sensitivity) for node, sensitivity in found.sensitivities.items()}
    rows = predict_thresholds(reports, parts, {}, found.variance_share, graph=graph)
    return Quantization(plan, reports, rows, "", count_file_bytes(graph, reports))


def weight_only_reports(graph: Graph, found: WeightOnlyResult, *, is_dynamic: bool = False) -> list[LayerReport]:
    """Return a row for each layer and lookup with a quantized weight and float inputs, or in float, in order."""
    reports: list[LayerReport] = []
    for node in graph.nodes:
        if node in found.evaluated:
            form = found.evaluated[node]
            stored = 0 if node in found.shared else _weight_elements(node)
            rounds_inputs = is_dynamic and node.op.trait is not LOOKUP
            widths, after = (form.bits, INT8_BITS if rounds_inputs else FLOAT32_BITS), form.bytes_of(stored)
            row = _report_layer(node, found.sensitivities, found.floats, widths, after)
            reports.append(replace(row, note=found.notes.get(node, "")))
        elif node in found.floats:
            widths = FLOAT32_BITS, FLOAT32_BITS
            reports.append(_report_layer(node, found.sensitivities, found.floats, widths, _weight_bytes(node)))
    return reports


def predict_thresholds(
    reports: Sequence[LayerReport],
    parts: Mapping[str, LayerErrorTerms],
    joints: Mapping[str, JointErrorTerm],
    varying: float,
    measured: float | None = None,
    *,
    graph: Graph,
) -> list[ThresholdPrediction]:
    """Predict the result at each threshold at which one more layer is quantized, assuming that layer errors add up.

    Args:
        reports: of all layers; only those with an estimated sensitivity count.
        parts: the error terms of these layers, by name; layers kept in float at any threshold have none.
        joints: their shared error terms, by value name.
        varying: the share of the outputs' squared norm that varies with the input.
        measured: the measured error of the current quantization, as a share of the outputs' squared norm, to correct
            the predictions. If it exceeds the sum of the layer errors, the excess grows with the number of layers,
            since the estimate for one layer was right. If it is lower, biases compensate for the error of earlier
            layers, with few layers as with many.
        graph: of these layers, in float.
    """
    foreseen = sum_layer_errors((parts[r.name] for r in reports if r.name in parts and not r.reason), joints)
    excess = measured / foreseen - 1 if measured and foreseen else 0.0
    sensitivities = [(r.sensitivity, r) for r in reports if r.sensitivity is not None and r.name in parts]
    rows: list[ThresholdPrediction] = []
    file, quantized = _FileSize(graph), list[LayerErrorTerms]()
    for count, (sensitivity, layer) in enumerate(sorted(sensitivities, key=lambda pair: pair[0]), 1):
        file.quantize(layer)
        quantized.append(parts[layer.name])
        error = sum_layer_errors(quantized, joints)
        error *= 1 + excess * (min(error / foreseen, 1.0) if excess > 0 else 1.0) if foreseen else 1.0
        rows.append(ThresholdPrediction(sensitivity, count, file.bytes, ratio_in_decibels(varying, error)))
    return rows


def ratio_in_decibels(signal: float, noise: float) -> float:
    """Return the ratio of two squared norms in dB."""
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)


def count_file_bytes(graph: Graph, reports: Iterable[LayerReport]) -> int:
    """Return the bytes of a file's weights and constants, with its layers as reported."""
    file = _FileSize(graph)
    for layer in reports:
        if not layer.reason:
            file.quantize(layer)
    return file.bytes


class _FileSize:
    """Counts the bytes of the constants in use, while one layer after another is quantized.

    A weight that several layers read also stays in float until the last of them is quantized.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = {node.name: node for node in walk(graph)}
        self._readers = {value: len(value.uses) for value in graph.constants.values() if value.uses}
        self.bytes = sum(map(_constant_bytes, self._readers))

    def quantize(self, layer: LayerReport) -> None:
        """Replace the weight of a layer by its quantized form."""
        self.bytes += layer.bytes_quantized
        for weight in _weights(self._nodes[layer.name]):
            self._readers[weight] -= 1
            if not self._readers[weight]:
                self.bytes -= _constant_bytes(weight)


def _weight_bytes(node: Node) -> int:
    """Return the bytes of a layer's weight before quantization."""
    return sum(map(_constant_bytes, _weights(node)))


def _constant_bytes(constant: Value) -> int:
    return constant.type.element_count * constant.type.dtype.itemsize


def _weight_elements(node: Node) -> int:
    return sum(weight.type.element_count for weight in _weights(node))


def _weights(node: Node) -> list[Value]:
    """Return the weights of a layer: one, several for recurrent layers, or none if the weight is computed."""
    if node.op.trait.matrices is not None:
        return matrices_of(node)
    weight = node.inputs[weight_position_of(node)]
    return [weight] if isinstance(weight, Value) and weight.is_constant else []
