"""The stages of quantization behind calibration, top to bottom: place, weigh, leave float, plan, correct, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.quantization.bias_correction import bias_corrections
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.layers import Choice
from clika_ref.quantization.observers import OBSERVERS
from clika_ref.quantization.placement import Placement, place
from clika_ref.quantization.planning import Planner
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.sensitivity import Sensitivities, sensitivities
from clika_ref.quantization.trials import Trial
from clika_ref.quantization.weights_only import Found, compressed_weights
from clika_ref.quantization_scheme import QuantizationScheme
from clika_ref.quantization_settings import QuantizationSettings

TRIED = ("mean of extremes", "least error")
"""The observers that are tried on each model.

The first is the better one where rare elements matter, as in convolutional networks, and the second where they belong
to a few tokens, as in transformers.
"""

FLOAT_BITS = 32

TAIL = "skip_tail_quantization: no other layer lies between it and an output"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A line of the summary: what became of a layer, and why."""

    name: str
    scope: str
    operator: str
    sensitivity: float | None
    """None where no target could compute it in integers, or the user skips it, so that it was not weighed."""
    reason: str
    """Why it stays float; nothing where it runs in integers, or holds its weight in them."""
    widths: tuple[int, int]
    """Bits of its weight and of what it reads, were it quantized."""
    bytes_before: int
    """Of its weight in float32."""
    bytes_quantized: int
    """Of its weight, were it quantized."""

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of its weight and of what it reads."""
        return (FLOAT_BITS, FLOAT_BITS) if self.reason else self.widths

    @property
    def bytes_after(self) -> int:
        """Of its weight."""
        return self.bytes_before if self.reason else self.bytes_quantized


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What another threshold would give."""

    threshold: float
    layers: int
    bytes: int
    """Of all weights of layers."""
    sqnr: float
    """Predicted, in dB, of the part of the outputs that varies with the input; infinite where nothing is quantized."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one graph is quantized for one target."""

    plan: Plan
    layers: Sequence[LayerReport]
    what_if: Sequence[WhatIf]
    observer: str
    """What the ranges of values were chosen by; nothing where only weights are quantized."""


def quantization(
    calibration: Calibration,
    scheme: QuantizationScheme,
    chosen: Mapping[Node, Choice],
    settings: QuantizationSettings,
    operators: Mapping[str, Operator],
) -> Quantization:
    """Decide what of a graph is quantized, and how.

    Args:
        calibration: of the graph as it is going to be written; its first batch is what sensitivities and
            corrections are estimated on, its second, where there is one, what both are tried on.
        scheme: what the target computes in integers.
        chosen: what the user chose for each node (`clika_ref.quantization.layers.choices`).
        settings: those of the whole model.
        operators: those of the registry.

    Raises:
        ModelError: a width is asked for that the target does not have.
    """
    graph, table = calibration.graph, calibration.table
    skipped = {node: choice.skipped for node, choice in chosen.items() if choice.skipped}
    if settings.skip_tail_quantization:
        skipped |= {node: TAIL for node in tail_layers(graph) if node not in skipped}
    if settings.prefer_weights_only_quantization and scheme.weights_only is not None:
        compressed = compressed_weights(calibration, scheme.weights_only, chosen, settings, skipped)
        found = _of_weights_only(graph, scheme, compressed)
        found.plan.smoothing = table.smoothing or {}
        return found
    _refuse_widths(chosen, scheme)
    has_range = _has_range(table)
    placement = place(graph, scheme, has_range, skipped)
    planner, inputs = Planner(table, scheme), calibration.reservoir.batches[0]
    trial = Trial(graph, operators, calibration.reservoir.batches[:2][-1])
    plans = {name: planner.plan(placement, OBSERVERS[name]) for name in TRIED}
    errors = {name: trial.error(plan) for name, plan in plans.items()}
    observer = min(TRIED, key=lambda name: errors[name])
    plan, error = plans[observer], errors[observer]
    weighed = sensitivities(graph, placement, plan, operators, inputs)
    too_sensitive = _too_sensitive(weighed, settings)
    if too_sensitive:
        placement = place(graph, scheme, has_range, {**skipped, **too_sensitive})
        plan = planner.plan(placement, OBSERVERS[observer])
        error = trial.error(plan)
    corrected = replace(plan, corrections=bias_corrections(graph, plan, operators, inputs))
    plan = corrected if trial.error(corrected) < error else plan
    if not plan.is_empty:
        plan.smoothing = table.smoothing or {}
    reports = _reports(placement, weighed, scheme)
    return Quantization(plan, reports, what_if(reports, weighed.varying), observer)


def _refuse_widths(chosen: Mapping[Node, Choice], scheme: QuantizationScheme) -> None:
    for node, choice in chosen.items():
        for wanted, kind, of in (
            (choice.weights_num_bits, scheme.weights, "weights"),
            ((choice.activations_num_bits,), scheme.activations, "activations"),
        ):
            lacking = [bits for bits in wanted if bits not in (8, kind.bits)]
            if lacking and node.op.trait.weight is not None:
                msg = (
                    f"{of} of {lacking[0]} bits are asked for {node.name} in {node.origin}; the target has {kind.bits}"
                )
                raise ModelError(msg)


def _has_range(table: RangeTable) -> Callable[[Value], bool]:
    def has(value: Value) -> bool:
        statistics = table.values.get(value.name)
        return statistics is not None and not statistics.is_empty and not statistics.is_unbounded

    return has


def tail_layers(graph: Graph) -> list[Node]:
    """Return the layers from which an output is reached without another layer between, in order."""
    found: list[Node] = []
    reached = set(graph.outputs)
    for node in graph.reversed_nodes():
        if not reached.isdisjoint(node.outputs):
            if node.op.trait.weight is not None:
                found.append(node)
            else:
                reached.update(v for v in node.inputs if isinstance(v, Value))
    return found[::-1]


def _too_sensitive(weighed: Sensitivities, settings: QuantizationSettings) -> dict[Node, str]:
    limit = settings.quantization_sensitivity_threshold
    if not settings.automatic_skip_quantization:
        return {}
    if not limit:
        return dict.fromkeys(weighed.of, "quantization_sensitivity_threshold=0: it would change the numbers")
    return {
        node: f"too sensitive: {found:.2g} is above quantization_sensitivity_threshold={limit:g}"
        for node, found in weighed.of.items()
        if found > limit
    }


def _of_weights_only(graph: Graph, scheme: QuantizationScheme, found: Found) -> Quantization:
    """Put together what became of the weights of layers."""
    plan = Plan(scheme)
    plan.compressed = {node.name: held for node, held in found.held.items()}
    plan.floats = {node.name: reason for node, reason in found.floats.items()}
    reports: list[LayerReport] = []
    for node in graph.nodes:
        if node in found.held or node in found.floats:
            tried, before = found.tried.get(node), _bytes(node)
            bits, after = (tried.bits, tried.bytes_of(before // 4)) if tried else (FLOAT_BITS, before)
            told = node.name, node.origin.scope, node.kind, found.weighed.get(node), found.floats.get(node, "")
            reports.append(LayerReport(*told, (bits, FLOAT_BITS), before, after))
    return Quantization(plan, reports, what_if(reports, found.varying), "")


def _reports(placement: Placement, weighed: Sensitivities, scheme: QuantizationScheme) -> list[LayerReport]:
    widths = scheme.weights.bits, scheme.activations.bits
    return [
        LayerReport(
            node.name,
            node.origin.scope,
            node.kind,
            weighed.of.get(node),
            placement.floats.get(node, ""),
            widths,
            _bytes(node),
            _bytes(node) // 4,
        )
        for node in (*placement.layers, *placement.floats)
    ]


def what_if(reports: Sequence[LayerReport], varying: float) -> list[WhatIf]:
    """Return what each threshold would give at which one more layer is quantized, errors of layers adding up.

    Args:
        reports: of all layers, of which those that were weighed count.
        varying: the share of the outputs' energy that varies with the input.
    """
    weighed = [(r.sensitivity, r) for r in reports if r.sensitivity is not None]
    whole = sum(r.bytes_before for _, r in weighed)
    rows: list[WhatIf] = []
    spoiled, saved = 0.0, 0
    for count, (sensitivity, layer) in enumerate(sorted(weighed, key=lambda pair: pair[0]), 1):
        spoiled, saved = spoiled + sensitivity, saved + layer.bytes_before - layer.bytes_quantized
        rows.append(WhatIf(sensitivity, count, whole - saved, decibels(varying, spoiled)))
    return rows


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two energies in dB."""
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)


def _bytes(node: Node) -> int:
    """Return what the weight of a layer takes in float32."""
    weight = node.inputs[node.op.trait.weight or 0]
    return math.prod(map(int, weight.type.shape)) * 4 if isinstance(weight, Value) and weight.is_constant else 0
