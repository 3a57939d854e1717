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
from clika_ref.quantization_scheme import QuantizationScheme
from clika_ref.quantization_settings import QuantizationSettings

TRIED = ("mean of extremes", "least error")
"""The observers that are tried on each model.

The first is the better one where rare elements matter, as in convolutional networks, and the second where they belong
to a few tokens, as in transformers.
"""

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
    """Why it stays float; nothing where it runs in integers."""
    bytes_before: int
    bytes_after: int


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
    """What the ranges of values were chosen by."""


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
    _refuse_widths(chosen, scheme)
    graph, table = calibration.graph, calibration.table
    skipped = {node: choice.skipped for node, choice in chosen.items() if choice.skipped}
    if settings.skip_tail_quantization:
        skipped |= {node: TAIL for node in tail_layers(graph) if node not in skipped}
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
    return Quantization(plan, _reports(placement, weighed), what_if(weighed), observer)


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


def _reports(placement: Placement, weighed: Sensitivities) -> list[LayerReport]:
    return [
        LayerReport(
            node.name,
            node.origin.scope,
            node.kind,
            weighed.of.get(node),
            placement.floats.get(node, ""),
            _bytes(node),
            _bytes(node) // (4 if node in placement.layers else 1),
        )
        for node in (*placement.layers, *placement.floats)
    ]


def what_if(weighed: Sensitivities) -> list[WhatIf]:
    """Return what each threshold would give at which one more layer is quantized, errors of layers adding up."""
    whole = sum(map(_bytes, weighed.of))
    rows: list[WhatIf] = []
    spoiled, saved = 0.0, 0
    for count, node in enumerate(sorted(weighed.of, key=lambda n: weighed.of[n]), 1):
        spoiled, saved = spoiled + weighed.of[node], saved + _bytes(node) * 3 // 4
        rows.append(WhatIf(weighed.of[node], count, whole - saved, decibels(weighed.varying, spoiled)))
    return rows


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two energies in dB."""
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)


def _bytes(node: Node) -> int:
    """Return what the weight of a layer takes in float32."""
    weight = node.inputs[node.op.trait.weight or 0]
    return math.prod(map(int, weight.type.shape)) * 4 if isinstance(weight, Value) and weight.is_constant else 0
