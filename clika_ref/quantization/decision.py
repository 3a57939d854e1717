"""What was decided for each layer of a graph, and what another threshold would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization.layer_weights import matrices_of, position_of
from clika_ref.quantization.placement import Placement
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.sensitivity import Joint, Parts, together
from clika_ref.quantization.weights_only import Found
from clika_ref.quantization_scheme import QuantizationScheme
from clika_ref.reporting.tables import Table, Told

FLOAT_BITS = 32


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A line of the summary: what became of a layer, and why."""

    name: str
    """Of the node in the graph."""
    scope: str
    """The path of its module."""
    operator: str
    """The name of its operator."""
    sensitivity: float | None
    """None where no target could compute it in integers, or the user skips it, so that it was not weighed."""
    reason: str
    """Why it stays float; nothing where it runs in integers, or holds its weight in them."""
    widths: tuple[int, int]
    """Bits of its weight and of what it reads, were it quantized."""
    bytes_before: int
    """Bytes of its weight as it is."""
    bytes_quantized: int
    """Bytes of its weight, were it quantized."""

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of its weight and of what it reads."""
        return (FLOAT_BITS, FLOAT_BITS) if self.reason else self.widths

    @property
    def bytes_after(self) -> int:
        """Bytes of its weight."""
        return self.bytes_before if self.reason else self.bytes_quantized


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What another threshold would give."""

    threshold: float
    """The share of the outputs' square that a single layer may change: ``quantization_sensitivity_threshold``."""
    layers: int
    """How many are in integers."""
    bytes: int
    """Of all weights and constants, which is the file but for its nodes and scales, some percent of a small one."""
    sqnr: float
    """Predicted, in dB, of what varies in the outputs; infinite where nothing is quantized, -inf if nothing varies."""


def told_decibels(ratio: float) -> str:
    """Return a ratio in dB as tables print it; infinite ones say what they mean.

    >>> told_decibels(31.04), told_decibels(math.inf), told_decibels(-math.inf)
    ('31.0 dB', 'exact', 'none: outputs are constant')
    """
    named = {math.inf: "exact", -math.inf: "none: outputs are constant"}
    return named.get(ratio, f"{ratio:.1f} dB")


def _decision(layer: LayerReport) -> str:
    return f"float: {layer.reason}" if layer.reason else "integers"


LAYERS: Mapping[str, Callable[[LayerReport], object]] = {
    "layer": lambda layer: layer.scope or layer.name,
    "operator": lambda layer: layer.operator,
    "weights": lambda layer: layer.bits[0],
    "activations": lambda layer: layer.bits[1],
    "QS": lambda layer: layer.sensitivity,
    "bytes": lambda layer: layer.bytes_before,
    "bytes after": lambda layer: layer.bytes_after,
    "decision": _decision,
}
"""Widths in bits, QS as quantization sensitivity."""

WHAT_IF: Mapping[str, Callable[[WhatIf], object]] = {
    "threshold": lambda row: row.threshold,
    "layers": lambda row: row.layers,
    "bytes of the file": lambda row: row.bytes,
    "predicted SQNR": lambda row: told_decibels(row.sqnr),
}

WHAT_IF_TITLE = "What another quantization_sensitivity_threshold would give"


@dataclass(frozen=True, slots=True, repr=False)
class Quantization(Told):
    """How one graph is quantized for one target; printed, a table of its layers and one of other thresholds."""

    plan: Plan
    """The scales, by the names of values and layers."""
    layers: Sequence[LayerReport]
    """A line for each layer."""
    what_if: Sequence[WhatIf]
    """A line for each threshold at which one more layer becomes integers, the least first."""
    observer: str
    """What the ranges of values were chosen by; nothing where only weights are quantized."""
    bytes: int
    """Of the file, as `WhatIf` counts them."""
    spared: Sequence[str] = ()
    """The layers that stay float at any threshold, as they cost little and spoil much."""
    observers: Mapping[str, str] = field(default_factory=dict[str, str])
    """By which observer the range of each value in integers was chosen, by their names."""

    @property
    def table(self) -> Table[LayerReport]:
        """What became of each layer, in order."""
        return Table(self.layers, LAYERS)

    @property
    def what_if_table(self) -> Table[WhatIf]:
        """What each threshold would give at which one more layer is quantized."""
        return Table(self.what_if, WHAT_IF)

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return both tables, with a heading between them."""
        return self.table, "", f"{WHAT_IF_TITLE}:", self.what_if_table


def layer_reports(placement: Placement, weighed: Mapping[Node, float], scheme: QuantizationScheme) -> list[LayerReport]:
    """Return a line for each layer: those in integers first, then those that stay float, each in order."""
    widths = scheme.weights.bits, scheme.activations.bits
    return [
        LayerReport(
            node.name,
            node.origin.scope,
            node.kind,
            weighed.get(node),
            placement.floats.get(node, ""),
            widths,
            _bytes(node),
            _elements(node),
        )
        for node in (*placement.layers, *placement.floats)
    ]


def of_weights_only(graph: Graph, scheme: QuantizationScheme, found: Found) -> Quantization:
    """Return what became of the weights of layers."""
    plan = Plan(scheme)
    plan.compressed = {node.name: held for node, held in found.held.items()}
    plan.floats = {node.name: reason for node, reason in found.floats.items()}
    reports: list[LayerReport] = []
    for node in graph.nodes:
        if node in found.held or node in found.floats:
            tried, before = found.tried.get(node), _bytes(node)
            bits, after = (tried.bits, tried.bytes_of(_elements(node))) if tried else (FLOAT_BITS, before)
            told = node.name, node.origin.scope, node.kind, found.weighed.get(node), found.floats.get(node, "")
            reports.append(LayerReport(*told, (bits, FLOAT_BITS), before, after))
    parts = {node.name: Parts(sensitivity) for node, sensitivity in found.weighed.items()}
    rows = what_if(reports, parts, {}, found.varying, graph=graph)
    return Quantization(plan, reports, rows, "", bytes_with(graph, reports))


def what_if(
    reports: Sequence[LayerReport],
    parts: Mapping[str, Parts],
    joints: Mapping[str, Joint],
    varying: float,
    measured: float | None = None,
    *,
    graph: Graph,
) -> list[WhatIf]:
    """Return what each threshold would give at which one more layer is quantized, errors of layers adding up.

    Args:
        reports: of all layers, of which those that were weighed count.
        parts: what the errors of these are made of, by name; layers that stay float at any threshold have none.
        joints: what they round together.
        varying: the share of the outputs' energy that varies with the input.
        measured: the error of the outputs with what is quantized, as a share of their energy, by which all are
            corrected. Where errors of layers add up to more, they do so the more the more there are, as what one layer
            alone does was estimated right. Where they come to less, biases take back what the layers before have left,
            of few layers as of many.
        graph: of these layers, in float.
    """
    foreseen = together((parts[r.name] for r in reports if r.name in parts and not r.reason), joints)
    excess = measured / foreseen - 1 if measured and foreseen else 0.0
    weighed = [(r.sensitivity, r) for r in reports if r.sensitivity is not None and r.name in parts]
    rows: list[WhatIf] = []
    file, quantized = _File(graph), list[Parts]()
    for count, (sensitivity, layer) in enumerate(sorted(weighed, key=lambda pair: pair[0]), 1):
        file.quantize(layer)
        quantized.append(parts[layer.name])
        error = together(quantized, joints)
        error *= 1 + excess * (min(error / foreseen, 1.0) if excess > 0 else 1.0) if foreseen else 1.0
        rows.append(WhatIf(sensitivity, count, file.bytes, decibels(varying, error)))
    return rows


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two energies in dB."""
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)


def bytes_with(graph: Graph, reports: Iterable[LayerReport]) -> int:
    """Return what the weights and constants of a file take whose layers are as they are reported."""
    file = _File(graph)
    for layer in reports:
        if not layer.reason:
            file.quantize(layer)
    return file.bytes


class _File:
    """What the constants of a graph take that anything reads, while one layer after another gets integers of its own.

    A weight that several read stays in float beside the integers of some of them, until the last one has its own.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._readers = {value: len(value.uses) for value in graph.constants.values() if value.uses}
        self.bytes = sum(map(_bytes_of, self._readers))

    def quantize(self, layer: LayerReport) -> None:
        """Let a layer read integers in place of its weight."""
        self.bytes += layer.bytes_quantized
        for weight in _weights(self._nodes[layer.name]):
            self._readers[weight] -= 1
            if not self._readers[weight]:
                self.bytes -= _bytes_of(weight)


def _bytes(node: Node) -> int:
    """Return what the weight of a layer takes as it is."""
    return sum(map(_bytes_of, _weights(node)))


def _bytes_of(constant: Value) -> int:
    return _size(constant) * constant.type.dtype.itemsize


def _elements(node: Node) -> int:
    return sum(map(_size, _weights(node)))


def _weights(node: Node) -> list[Value]:
    """Return the weight of a layer; of one that has several, as recurrent ones, all; none where it is computed."""
    if node.op.trait.matrices is not None:
        return matrices_of(node)
    weight = node.inputs[position_of(node)]
    return [weight] if isinstance(weight, Value) and weight.is_constant else []


def _size(constant: Value) -> int:
    return math.prod(map(int, constant.type.shape))
