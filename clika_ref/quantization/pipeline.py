"""The post-calibration steps of quantization: placement, observers, sensitivity, mixed precision, bias correction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizationScheme, WeightOnlyScheme
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation, select_evaluation_batches
from clika_ref.quantization.algorithms.gptq import round_weights
from clika_ref.quantization.algorithms.mixed_precision import find_layers_without_gain, select_float_layers
from clika_ref.quantization.algorithms.recurrent import RecurrentResult, quantize_recurrent_layers
from clika_ref.quantization.algorithms.sensitivity import (
    LayerErrorTerms,
    Sensitivities,
    estimate_sensitivities,
    merge_sensitivities,
    name_in_graph,
    sensitivity_reason,
    source_of_rounding,
    variance_share,
)
from clika_ref.quantization.algorithms.weight_only import list_layer_options, quantize_tables, quantize_weights_only
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.observer_search import (
    MAX_LOSS_ON_LARGER_INPUTS,
    OBSERVER_CANDIDATES,
    ObserverSearchResult,
    search_observers,
)
from clika_ref.quantization.decision import (
    Quantization,
    count_file_bytes,
    layer_reports,
    merge_quantizations,
    predict_thresholds,
    recurrent_reports,
    summarize_weight_only,
    weight_only_reports,
)
from clika_ref.quantization.layer_settings import NodeSettings
from clika_ref.quantization.plan_measurements import PlanMeasurements
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import weight_position_of
from clika_ref.quantization.qdq.packed_weights import has_output_rows
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT, Placement, choose_placement
from clika_ref.quantization.qdq.planning import Planner
from clika_ref.quantization.qdq.recurrent_layers import find_input_block, list_dynamic_layers
from clika_ref.settings.compile_options import ClikaCompileOptions, Switch
from clika_ref.settings.quantization import INT8_BITS, QuantizationSettings

FLOAT_BODIES_REASON = "the target computes layers inside control flow in float"

UNENTERED_REASON = "no calibration input entered this branch"

SKIP_TAIL_REASON = "skip_tail_quantization: it is the last layer before an output"

SHORT_ROWS_REASON = "its {} inputs are fewer than the {} that share a scale at run time"


@dataclass(frozen=True)
class _LayerChoice:
    """The layers to quantize."""

    placement: Placement
    plan: Plan
    error: float
    """Error of the plan on held-out data."""
    cheap: Mapping[Node, str]
    """Layers that may stay in float at any threshold, with the reason."""


@dataclass
class QuantizationPipeline:
    """Decides how one calibrated graph is quantized; results that do not depend on the threshold are computed once.

    Sensitivities and corrections are estimated on the first calibration batch, and candidates are evaluated on several
    held-out ones.

    Raises:
        ModelError: a width or block size is requested that the target does not support; or all calibration data is 0.
    """

    calibration: Calibration
    """Calibration of the lowered graph."""
    scheme: QuantizationScheme
    """Quantization scheme of the target."""
    chosen: Mapping[Node, NodeSettings]
    """Settings of the user for each node (`clika_ref.quantization.layer_settings.resolve_node_settings`)."""
    settings: QuantizationSettings
    """Settings of the model."""
    operators: Mapping[str, Operator]
    """Operators of the registry."""
    options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Algorithms to use."""
    slow_layers: Mapping[Node, str] = field(default_factory=dict[Node, str])
    """Layers that stay in float because they are slower when quantized, with the slowdown."""
    cheap_layers: Mapping[Node, str] | None = None
    """Layers that may stay in float for mixed precision, chosen among several graphs; None to choose in this one."""
    _start_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        weight_only = self._weight_only_scheme
        if weight_only is not None:
            list_layer_options(self._graph, weight_only, self.chosen, self.settings, self._user_skips)
        else:
            _reject_widths(self.chosen, self.scheme)
            if self._graph.parent is None:
                self._reject_zero_data()

    def _reject_zero_data(self) -> None:
        """Reject calibration data of zeros: each range would be that of biases alone."""
        table = self.calibration.table
        measured = [v for v in self._graph.inputs if table.has_range(v)]
        if measured and all(table.find_constant(v) == 0 for v in measured):
            names = ", ".join(repr(v.name) for v in measured)
            raise ModelError(
                f"cannot quantize {self._graph.name}: {names} {'was' if len(measured) == 1 else 'were'} 0 in all "
                "calibration data. Give inputs as in use as calibration_inputs."
            )

    def decide(self, threshold: float | None = None) -> Quantization:
        """Return the quantization at a threshold.

        Args:
            threshold: replaces the ``quantization_sensitivity_threshold`` of the settings.

        Raises:
            ModelError: the target supports none of the weight widths or block sizes in the settings.
        """
        settings = self.settings if threshold is None else self.settings.with_threshold(threshold)
        weight_only = self._weight_only_scheme
        is_float_body = self._graph.parent is not None and self.scheme.has_float_bodies
        if is_float_body or not self.calibration.reservoir.batches:
            found = self._keep_in_float(FLOAT_BODIES_REASON if is_float_body else UNENTERED_REASON)
        elif weight_only is None:
            found = self._decide_with_activations(settings)
        else:
            found = self._decide_weight_only(settings, weight_only)
        for body in self._bodies:
            found = merge_quantizations(found, body.decide(threshold), self._graph)
        if not found.plan.is_empty:
            found.plan.smoothing = self.calibration.table.smoothing or {}
        return found

    @property
    def _weight_only_scheme(self) -> WeightOnlyScheme | None:
        """The form of weights if activations have no static ranges."""
        only = self.scheme.weights_only if self.settings.prefer_weights_only_quantization else None
        if only is None or not self.settings.dynamic_activations:
            return only
        if self._input_block:
            return replace(only, bits=frozenset({INT8_BITS}))
        layers = frozenset(list_dynamic_layers(self.scheme))
        return replace(only, layers=layers, bits=frozenset({self.scheme.weights.bits}))

    @property
    def _input_block(self) -> int:
        """Number of elements that share a scale if the runtime rounds the inputs of layers on request; 0 if not."""
        return find_input_block(self.scheme) if self.settings.dynamic_activations else 0

    def _keep_in_float(self, reason: str) -> Quantization:
        """Return the decision for a body whose layers all stay in float."""
        placement = self._place(dict.fromkeys(self._graph.nodes, reason))
        plan = Plan(self.scheme, floats={node.name: reason for node, reason in placement.floats.items()})
        return Quantization(plan, layer_reports(placement, {}, self.scheme), [], "", 0)

    def _decide_weight_only(self, settings: QuantizationSettings, weight_only: WeightOnlyScheme) -> Quantization:
        is_dynamic = settings.dynamic_activations
        found = quantize_weights_only(
            self.calibration,
            weight_only,
            self.chosen,
            settings,
            self._skip_reasons,
            forced=self._find_forced_layers(settings),
            find_options=self._find_rounding_options,
            dynamic=self.operators["dynamic_linear"] if is_dynamic and not self._input_block else None,
            input_block=self._input_block,
        )
        recurrent = self._decide_recurrent(settings, self.scheme.dynamic)
        return summarize_weight_only(self._graph, self.scheme, found, recurrent, is_dynamic=is_dynamic)

    def _decide_recurrent(self, settings: QuantizationSettings, forms: Mapping[str, int | None]) -> RecurrentResult:
        return quantize_recurrent_layers(
            self.calibration,
            forms,
            self.scheme.weights.bits,
            settings,
            self._skip_reasons,
            self.operators,
            self._find_rounding_options,
        )

    def _find_rounding_options(self) -> ClikaCompileOptions:
        """Return the options for the next weight: without GPTQ if it is on ``"auto"`` and the time is over."""
        is_skipped = self.options.gptq == "auto" and self._is_time_over
        return replace(self.options, gptq="off") if is_skipped else self.options

    def _decide_with_activations(self, settings: QuantizationSettings) -> Quantization:
        search = self.observer_search
        chosen = self._choose_layers(search, settings)
        if search.default is not None and self._loses_on_larger_inputs(chosen, search.default.observer):
            search = search.default
            chosen = self._choose_layers(search, settings)
        placement, sensitivities = chosen.placement, search.sensitivities
        remaining: dict[str, float] = {}
        plan, error = self._try_change(
            self.options.gptq, lambda p: self._round_weights(p, remaining), chosen.plan, chosen.error
        )
        remaining = {name: share for name, share in remaining.items() if name in plan.offsets}
        plan, error = self._correct_biases(plan, error)
        tables = quantize_tables(self.calibration, plan, settings, self._skip_reasons, self._find_rounding_options)
        recurrent = self._decide_recurrent(settings, list_dynamic_layers(self.scheme))
        placement = replace(placement, floats=recurrent.replace_floats(placement.floats))
        plan = replace(
            plan,
            packed_weights={**{node.name: packed for node, packed in tables.packed.items()}, **recurrent.matrices},
            dynamic={node.name: is_dynamic for node, is_dynamic in recurrent.quantized.items()},
            floats={node.name: reason for node, reason in placement.floats.items()},
        )
        reports = [
            *layer_reports(placement, {**sensitivities.of, **recurrent.sensitivities}, self.scheme),
            *recurrent_reports(recurrent, self.scheme),
            *weight_only_reports(self._graph, tables),
        ]
        varying = variance_share(sensitivities.outputs, *self.evaluation.outputs)
        parts = {
            n.name: replace(part, own=part.own * remaining.get(n.name, 1.0))
            for n, part in sensitivities.parts.items()
            if n not in chosen.cheap or n in placement.layers
        }
        estimated = {**tables.sensitivities, **recurrent.sensitivities}
        parts |= {node.name: LayerErrorTerms(share) for node, share in estimated.items()}
        rows = predict_thresholds(reports, parts, sensitivities.joints, varying, error, graph=self._graph)
        kept_in_float = [node.origin.scope or node.name for node in placement.floats if node in chosen.cheap]
        size, observers = count_file_bytes(self._graph, reports), search.observers_of(plan)
        return Quantization(replace(plan), reports, rows, search.observers, size, kept_in_float, observers)

    def _choose_layers(self, search: ObserverSearchResult, settings: QuantizationSettings) -> _LayerChoice:
        """Return the layers to quantize with the ranges of a search: all but sensitive and cheap ones."""
        forced = self._find_forced_layers(settings)
        too_sensitive = _find_sensitive_layers(search.sensitivities, settings, forced)
        cheap = self._find_cheap_layers(search, settings, {*too_sensitive, *forced})
        if too_sensitive:
            found = self._choose_without(too_sensitive, search, cheap)
        else:
            found = _LayerChoice(self.placement, search.plan, self.measurements.measure_error(search.plan), cheap)
        if cheap:
            mixed = self._choose_without({**too_sensitive, **cheap}, search, cheap)
            found = mixed if self.options.mixed_precision == "on" or mixed.error < found.error else found
        return found

    def _choose_without(
        self, floats: Mapping[Node, str], search: ObserverSearchResult, cheap: Mapping[Node, str]
    ) -> _LayerChoice:
        """Return the choice of layers with further ones in float."""
        placement = self._place({**self._skip_reasons, **floats})
        plan = self.planner.plan(placement, search.observer, search.own)
        return _LayerChoice(placement, plan, self.measurements.measure_error(plan), cheap)

    def _loses_on_larger_inputs(self, chosen: _LayerChoice, default: str) -> bool:
        """Whether the ranges of the default observer are much better beyond the calibration data.

        Decided for the layers in use: a sensitive one, while quantized, hides the errors of all others.
        """
        larger = self.evaluation.on_larger_inputs
        if larger is None:
            return False
        wide = self.planner.plan(chosen.placement, default)
        return larger.error(chosen.plan) > MAX_LOSS_ON_LARGER_INPUTS * larger.error(wide)

    def _find_cheap_layers(
        self, search: ObserverSearchResult, settings: QuantizationSettings, decided: Collection[Node]
    ) -> Mapping[Node, str]:
        """Return the layers, among those not decided yet, that cause much of the error and cost little."""
        if self.options.mixed_precision == "off" or not settings.automatic_skip_quantization:
            return {}
        if self.cheap_layers is not None:
            return {node: reason for node, reason in self.cheap_layers.items() if node not in decided}
        sensitivities = search.sensitivities.without_layers(decided)
        return select_float_layers(sensitivities, self.find_outputs(sensitivities))

    def find_undecided(self) -> Sensitivities:
        """Return the sensitivities of the layers that mixed precision may keep in float."""
        search = self.observer_search
        forced = self._find_forced_layers(self.settings)
        decided = {*_find_sensitive_layers(search.sensitivities, self.settings, forced), *forced}
        return search.sensitivities.without_layers(decided)

    def find_outputs(self, sensitivities: Sensitivities) -> dict[Node, str]:
        """Return the name of the value that each layer returns, and that may be rounded."""
        placement = self.placement
        return {node: source_of_rounding(placement.layers[node], placement).name for node in sensitivities.parts}

    def _try_change(
        self, switch: Switch, change: Callable[[Plan], Plan], plan: Plan, error: float
    ) -> tuple[Plan, float]:
        """Return a changed plan and its error on data, or those given if the change is off or no improvement."""
        if switch == "off" or plan.is_empty or (switch == "auto" and self._is_time_over):
            return plan, error
        changed = change(plan)
        found = self.measurements.measure_error(changed)
        return (changed, found) if switch == "on" or found < error else (plan, error)

    def _round_weights(self, plan: Plan, remaining: dict[str, float]) -> Plan:
        """Return a plan with weights rounded by GPTQ; ``remaining`` receives the remaining share of each error."""
        only_cheap = self.options.gptq == "auto"
        kept = self.calibration.reservoir
        batches = [kept.batches[i] for i in kept.fitted_indices[: 1 if only_cheap else None]]
        found = round_weights(self._graph, plan, batches, only_cheap=only_cheap)
        if not found:
            return plan
        remaining.update({name: rounded.left for name, rounded in found.items()})
        return replace(plan, offsets={name: rounded.offsets for name, rounded in found.items()})

    def _correct_biases(self, plan: Plan, error: float) -> tuple[Plan, float]:
        """Return a plan with bias correction, if few samples show that it helps; further batches then refine it."""
        switch, measurements = self.options.bias_correction, self.measurements
        corrected, error = self._try_change(switch, measurements.correct_biases, plan, error)
        if not corrected.corrections:
            return corrected, error
        return self._try_change(switch, lambda _: measurements.correct_biases_further(plan), corrected, error)

    @property
    def _is_time_over(self) -> bool:
        """Whether `ClikaCompileOptions.algorithm_seconds` have passed."""
        seconds = self.options.algorithm_seconds
        return bool(seconds) and time.monotonic() - self._start_time > seconds

    def _find_forced_layers(self, settings: QuantizationSettings) -> list[Node]:
        """Return the layers to quantize regardless of their sensitivity."""
        is_lossless = not settings.quantization_sensitivity_threshold
        return [] if settings.skip_tail_quantization is not False or is_lossless else tail_layers(self._graph)

    # Results that do not depend on the threshold

    @property
    def _graph(self) -> Graph:
        return self.calibration.graph

    @cached_property
    def _bodies(self) -> list[QuantizationPipeline]:
        """The decisions for the bodies of control flow, each by the inputs that reach it."""
        return [replace(self, calibration=part) for part in self.calibration.of_bodies()]

    @cached_property
    def _user_skips(self) -> dict[Node, str]:
        """Nodes that the user keeps in float, with the setting for each."""
        return {node: choice.skipped for node, choice in self.chosen.items() if choice.skipped}

    @cached_property
    def _skip_reasons(self) -> dict[Node, str]:
        """Nodes that stay in float at any threshold, with the reason for each."""
        skipped = {**self.slow_layers, **self._user_skips}
        if self.settings.skip_tail_quantization:
            skipped |= {node: SKIP_TAIL_REASON for node in tail_layers(self._graph) if node not in skipped}
        if self.settings.dynamic_activations:
            skipped = {**self._find_unroundable_layers(), **skipped}
        return skipped | self._find_layers_without_gain(skipped)

    def _find_unroundable_layers(self) -> dict[Node, str]:
        """Return the layers with weights that the target does not multiply with inputs rounded at run time."""
        layers = [node for node in self._graph.nodes if node.op.trait.kind == COMPUTE_TRAIT]
        operands = {node: node.inputs[weight_position_of(node)] for node in layers}
        types = {node: v.type for node, v in operands.items() if isinstance(v, Value) and v.is_constant}
        matrices = {node: kind.shape for node, kind in types.items() if kind.rank == 2}
        lengths = {node: int(shape[1 if has_output_rows(node) else 0]) for node, shape in matrices.items()}
        short = {node: length for node, length in lengths.items() if length < self._input_block}
        found = {node: SHORT_ROWS_REASON.format(length, self._input_block) for node, length in short.items()}
        other = {node: kind.dtype for node, kind in types.items() if kind.dtype != torch.float32}
        return found | {node: f"its weight is {dtype}" for node, dtype in other.items()}

    def _find_layers_without_gain(self, skipped: Mapping[Node, str]) -> dict[Node, str]:
        """Return the layers that INT8 makes no faster, unless the settings force them to be quantized."""
        batches = self.calibration.reservoir.batches
        if not self.settings.automatic_skip_quantization or self._weight_only_scheme is not None or not batches:
            return {}
        found = find_layers_without_gain(self._place(skipped), read_sizes(self._graph, batches[0]))
        forced = self._find_forced_layers(self.settings)
        return {node: reason for node, reason in found.items() if node not in forced}

    def _place(self, skipped: Mapping[Node, str]) -> Placement:
        table = self.calibration.table
        return choose_placement(
            self._graph,
            self.scheme,
            table.has_range,
            skipped,
            is_negative=table.is_negative,
            find_constant=table.find_constant,
        )

    @cached_property
    def placement(self) -> Placement:
        """The layers to quantize at an infinite threshold, and the activations around them."""
        return self._place(self._skip_reasons)

    @cached_property
    def planner(self) -> Planner:
        """Computes the scales of a placement from the calibration."""
        return Planner(self.calibration.table, self.scheme, clips=self.options.weight_clipping != "off")

    @cached_property
    def evaluation(self) -> CandidateEvaluation:
        """Measures the output error of a plan on samples of several held-out batches."""
        kept = self.calibration.reservoir
        held_out = select_evaluation_batches(self._graph, [kept.batches[i] for i in kept.evaluation_indices])
        return CandidateEvaluation(self._graph, self.operators, held_out)

    @cached_property
    def measurements(self) -> PlanMeasurements:
        """Measures plans, each once."""
        return PlanMeasurements(self.calibration, self.evaluation, self.operators)

    @cached_property
    def observer_search(self) -> ObserverSearchResult:
        """The best observer of each activation, with the sensitivities of all layers."""
        observers = OBSERVER_CANDIDATES[self.options.observer][: 1 if self._is_time_over else None]
        measure = self._make_measurement()
        return search_observers(self.planner, self.placement, measure, self._estimate_sensitivities, observers)

    def _make_measurement(self) -> Callable[[Plan], float]:
        """Return a function that measures the errors of plans on data, with bias correction if that helps the first.

        Bias correction removes most of the error of some networks, and not the same share for all ranges.
        """
        switch, is_helpful = self.options.bias_correction, None
        measurements = self.measurements

        def measure(plan: Plan) -> float:
            nonlocal is_helpful
            if switch == "off" or plan.is_empty or is_helpful is False:
                return measurements.measure_error(plan)
            corrected = measurements.measure_error(measurements.correct_biases(plan))
            if is_helpful or switch == "on":
                return corrected
            error = measurements.measure_error(plan)
            is_helpful = corrected < error
            return min(corrected, error)

        return measure

    def _estimate_sensitivities(self, plan: Plan, rivals: Sequence[Plan]) -> Sensitivities:
        seen, inputs = self.calibration.table.values, self.calibration.reservoir.batches[0]
        return estimate_sensitivities(
            self._graph, self.placement, plan, self.operators, inputs, seen=seen, rivals=rivals
        )


def choose_float_layers_together(of_graphs: Sequence[QuantizationPipeline], gains: Sequence[float]) -> None:
    """Choose the layers that mixed precision keeps in float among those of several graphs, the pieces of one model.

    Args:
        of_graphs: the decisions for each graph.
        gains: the relative error at the outputs of the model for a relative error of 1 at those of each graph.
    """
    undecided = [stages.find_undecided().scale(gain) for stages, gain in zip(of_graphs, gains, strict=True)]
    outputs = {
        node: name_in_graph(index, name)
        for index, (stages, found) in enumerate(zip(of_graphs, undecided, strict=True))
        for node, name in stages.find_outputs(found).items()
    }
    cheap = select_float_layers(merge_sensitivities(undecided), outputs)
    for stages, found in zip(of_graphs, undecided, strict=True):
        stages.cheap_layers = {node: reason for node, reason in cheap.items() if node in found.parts}


def _reject_widths(chosen: Mapping[Node, NodeSettings], scheme: QuantizationScheme) -> None:
    for node, choice in chosen.items():
        for requested, kind, option in (
            (choice.weights_num_bits, scheme.weights, "weights_num_bits"),
            ((choice.activations_num_bits,), scheme.activations, "activations_num_bits"),
        ):
            unsupported = [bits for bits in requested if bits not in (8, kind.bits)]
            if len(unsupported) == len(requested) and node.op.trait.weight is not None:
                used = f" (of which it uses {kind.bits} here)" if kind.bits != 8 else ""
                form = ", alone or in a list" if option == "weights_num_bits" else ""
                raise ModelError(
                    f"{option}: {unsupported[0]} bits are requested for {node.name} in {node.origin}, but the target "
                    f"supports 8{used}. Use 8 in {option}{form}."
                )


def tail_layers(graph: Graph) -> list[Node]:
    """Return the layers without another layer between them and an output, in graph order."""
    found: list[Node] = []
    reached = set(graph.outputs)
    for node in graph.nodes_backward():
        if not reached.isdisjoint(node.outputs):
            if node.op.trait.weight is not None:
                found.append(node)
            else:
                reached.update(v for v in node.inputs if isinstance(v, Value))
    return found[::-1]


def _find_sensitive_layers(
    sensitivities: Sensitivities, settings: QuantizationSettings, forced: Collection[Node]
) -> dict[Node, str]:
    limit = settings.quantization_sensitivity_threshold
    if not settings.automatic_skip_quantization:
        return {}
    return {
        node: sensitivity_reason(found, limit)
        for node, found in sensitivities.of.items()
        if not limit or (found > limit and node not in forced)
    }
