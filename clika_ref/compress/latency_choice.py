"""Choose between whole quantizations of a graph by their time in the runtime of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clika_ref.compiled.latency import MIN_DIFFERENCE, LayerTimer, measure_ratio_to_float, take_one_sample
from clika_ref.core.ir import Graph, Node
from clika_ref.core.registry import Registry
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog

DEFAULT_PLAN, WITHOUT_SLOW_LAYERS, ALL_LAYERS = "the default plan", "without slower layers", "all layers in INT8"


@dataclass(frozen=True)
class LatencyCandidate:
    """A quantization, with its time."""

    name: str
    found: Quantization
    ratio: float
    """Time divided by that of float."""

    def __str__(self) -> str:
        return f"{self.name} {self.ratio:.2f}x"


def choose_fastest(
    stages: QuantizationPipeline, graph: Graph, request: QuantizationRequest, registry: Registry, log: CompilationLog
) -> Quantization:
    """Return the fastest quantization of a calibrated graph, or nothing quantized if float is faster than all.

    The default plan is preferred to candidates that are not clearly faster.

    Args:
        stages: of the graph; its slow layers are those that are slower alone.
        graph: of the module, before lowering.
        request: the choices of the user.
        registry: the plugins.
        log: receives the time of each candidate.
    """
    inputs = take_one_sample(stages.calibration.graph, stages.calibration.reservoir.batches[0])

    def measure(name: str, found: Quantization) -> LatencyCandidate:
        return LatencyCandidate(
            name, found, measure_ratio_to_float(graph, found.plan, request.target, registry, inputs)
        )

    plans = _without_repeated(_list_plans(stages, request, registry))
    preferred = next(iter(plans.values()))
    if preferred.plan.is_empty:
        return preferred
    candidates = [measure(name, found) for name, found in plans.items() if not found.plan.is_empty]
    fastest = min(candidate.ratio for candidate in candidates)
    chosen = next(each for each in candidates if each.ratio <= fastest / (1 - MIN_DIFFERENCE))
    times = ", ".join(map(str, candidates))
    if chosen.ratio > 1 + MIN_DIFFERENCE:  # only the fastest one may still be as fast as float
        chosen = min(candidates, key=lambda candidate: candidate.ratio)
    if chosen.ratio <= 1 + MIN_DIFFERENCE:
        log.show(f"Times compared with float: {times}. Chosen: {chosen.name}")
        return chosen.found
    log.show(f"Times compared with float: {times}. Each is slower than float, so the model stays in float")
    reason = f"the quantized model takes {chosen.ratio:.2f}x the time of the float model"
    return _decide_without(stages, dict.fromkeys(stages.chosen, reason))


def _list_plans(
    stages: QuantizationPipeline, request: QuantizationRequest, registry: Registry
) -> dict[str, Quantization]:
    """Return the quantizations to time, by name, the preferred one first."""
    if request.settings.prefer_weights_only_quantization:
        plans = {DEFAULT_PLAN: stages.decide()}
        timer = LayerTimer(request.target, request.scheme, registry.operators)
        inputs, plan = stages.calibration.reservoir.batches[0], plans[DEFAULT_PLAN].plan
        packed, graph = plan.packed_weights, stages.calibration.graph
        slow = timer.find_slow_layers(graph, inputs, packed, plan.dynamic) if packed else {}
        return {WITHOUT_SLOW_LAYERS: _decide_without(stages, slow)} if slow else plans
    plans = {DEFAULT_PLAN: _decide_without(stages, {})}
    if stages.slow_layers:
        plans[WITHOUT_SLOW_LAYERS] = stages.decide()
    if stages.settings.automatic_skip_quantization and any(layer.reason for layer in plans[DEFAULT_PLAN].layers):
        whole = replace(stages.settings, automatic_skip_quantization=False)
        plans[ALL_LAYERS] = replace(stages, settings=whole, slow_layers={}).decide()
    return plans


def _decide_without(stages: QuantizationPipeline, layers: Mapping[Node, str]) -> Quantization:
    """Return the quantization with some layers in float, given the reason for each."""
    return stages.decide() if layers == stages.slow_layers else replace(stages, slow_layers=layers).decide()


def _without_repeated(plans: Mapping[str, Quantization]) -> dict[str, Quantization]:
    """Return the plans without those that quantize the same layers as an earlier one."""
    seen: list[Sequence[str]] = []
    kept: dict[str, Quantization] = {}
    for name, found in plans.items():
        layers = sorted((*found.plan.weights, *found.plan.packed_weights))
        if layers not in seen:
            seen.append(layers)
            kept[name] = found
    return kept
