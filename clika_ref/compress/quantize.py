"""Quantize a compiled module: with data, to an accuracy goal, and for other targets from its calibration ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.quantization_state import is_plan_valid
from clika_ref.compiled.state import CompiledModule, CompiledState, learned_quantization, set_quantization
from clika_ref.compress.calibrate import CalibratedRun, CalibrationArguments, calibrate
from clika_ref.compress.graph_quantization import begin_calibration, calibrate_graph, decide_quantization
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.targets import Target
from clika_ref.distributed.decisions import broadcast_score, decide_on_rank0
from clika_ref.distributed.ranks import open_ranks
from clika_ref.quantization.algorithms.accuracy_search import AccuracySearch
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.report import NO_DECISIONS_MESSAGE
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.quantization.weight_checks import reject_nonfinite_weights
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_callable
from clika_ref.settings.compile_options import BaseDeploymentSettings

NO_RANGES = (
    "cannot quantize for {}: the module holds no calibration ranges. It was never calibrated, or it is a copy or was "
    "loaded without them. Pass data: clika_initialize_algorithms(calibration_inputs=..., deployment_settings=...). "
    "Files keep the ranges with clika_save(path, keep_calibration_inputs=True), or clika-ref quantize --keep-inputs."
)

NO_REQUEST = (
    "cannot quantize for {}: the module holds calibration ranges, but was not quantized with them yet. Call "
    "clika_initialize_algorithms(), which reads no data"
)

CHANGED_WEIGHTS_WARNING = (
    "The weights have changed since their scales were computed: values beyond the old ranges are clipped. "
    "clika_initialize_algorithms() computes new scales, {}."
)

AnyModule = TypeVar("AnyModule", bound=CompiledModule)


def quantize(module: CompiledModule, given: CalibrationArguments) -> Quantization:
    """Calibrate and quantize a module; return the decisions."""
    with calibrate(module, given) as ready:
        found = decide_quantization(
            ready.pipeline, ready.graph, ready.request, module.clika_state.registry, ready.log, ranks=ready.ranks
        )
    module.clika_state.deployment = ready.deployment
    set_quantization(module, ready.quantized(found), ready.pipeline.calibration, ready.request)
    return found


def quantize_to_goal(
    module: AnyModule, eval_fn: Callable[[AnyModule], float], max_drop: float, given: CalibrationArguments
) -> AccuracySearch:
    """Quantize as much of a module as possible while a score drops by at most ``max_drop``; return the candidates."""
    with open_ranks(given.distributed_training_settings or module.clika_state.distributed):
        check_callable("eval_fn", eval_fn, ("module",))
        search = AccuracySearch(max_drop)
    with calibrate(module, given) as ready:
        _search(module, search, eval_fn, ready)
    return search


def _search(
    module: AnyModule, search: AccuracySearch, eval_fn: Callable[[AnyModule], float], ready: CalibratedRun
) -> None:
    """Run a search on a module, which ends with the best candidate, or with its previous state."""
    state = module.clika_state
    before, former, training = learned_quantization(module), state.request, module.training
    pipeline, request = ready.pipeline, ready.request
    if request.ineffective_in_search:
        ready.log.warning(f"{', '.join(request.ineffective_in_search)} has no effect in a search by a goal")

    def adopt(found: Quantization | None) -> None:
        searched = replace(request, given=search.settings(request.given))
        set_quantization(module, found and ready.quantized(found), pipeline.calibration, searched)

    def score(found: Quantization | None) -> float:
        adopt(found)
        module.eval()  # again, since the last evaluation may have set train mode
        with torch.no_grad():
            own = eval_fn(module)
        return broadcast_score(own, ready.ranks)

    def decide_at(threshold: float) -> Quantization:
        return decide_on_rank0(partial(pipeline.decide, threshold), pipeline.scheme, ready.ranks)

    try:
        with ready.log.stage("Searching") as stage:
            search.run(decide_at, score)
            stage.done(search.summarize())
    finally:
        if search.best is not None or search.is_done:
            adopt(search.best and search.best.found)
            state.deployment = ready.deployment
        else:
            set_quantization(module, before, pipeline.calibration, former)
        module.train(training)
    ready.log.table("Goal", search.table)


def require_decisions(state: CompiledState) -> Quantization:
    """Return the decision for each layer.

    Raises:
        ModelError: nothing was decided, or only the scales are known, as in a loaded module.
    """
    found = state.quantized and state.quantized.found
    if found is None:
        raise ModelError(NO_DECISIONS_MESSAGE)
    return found


def plan_for(module: CompiledModule, graph: Graph, deployment: BaseDeploymentSettings) -> Plan | None:
    """Return the quantization plan of a module for a target: its own, or one decided from its calibration ranges.

    Args:
        module: does not change.
        graph: that of the module, bound to its weights.
        deployment: the target.

    Raises:
        ModelError: the module holds no ranges, as after loading, or nothing was decided from them; or weights are NaN.
        TargetError: the target computes in float, or no plugin provides it.
    """
    state, own = module.clika_state, learned_quantization(module)
    if own is None:
        return None
    reject_nonfinite_weights(graph)  # as `.eval()` does: an all-NaN module would match its artifact
    target, known = target_for(deployment, state.registry), state.deployment
    if own.target == target.name:
        former = target_for(known, state.registry) if known is not None and known.target == own.target else None
        if is_plan_valid(own.plan, target, former):
            return own.plan
    return decide_for(module, graph, target).plan


def warn_of_changed_weights(module: CompiledModule, graph: Graph, plan: Plan | None, log: CompilationLog) -> None:
    """Warn if a plan has the scales of weights that have changed since, by training in float or loading."""
    state = module.clika_state
    own, is_trained = state.quantized, state.training_executor is not None
    if not is_trained and own is not None and own.plan is plan and own.model not in ("", fingerprint(graph)):
        data = "without data" if state.calibration is not None else "given calibration_inputs"
        log.warning(CHANGED_WEIGHTS_WARNING.format(data))


def require_ranges(state: CompiledState, target: Target) -> tuple[QuantizationRequest, Calibration]:
    """Return the user's quantization request, and the calibration ranges for another target.

    Raises:
        ModelError: there are none, or nothing was decided from them yet.
    """
    if state.calibration is None:
        raise ModelError(NO_RANGES.format(target.name))
    if state.request is None:
        raise ModelError(NO_REQUEST.format(target.name))
    return state.request, state.calibration


def decide_for(module: CompiledModule, graph: Graph, target: Target) -> Quantization:
    """Decide the quantization of a module for a target from its calibration ranges.

    Args:
        module: does not change.
        graph: that of the module, bound to its weights.
        target: the target.

    Raises:
        ModelError: the module holds no ranges, or nothing was decided from them.
        TargetError: the target computes in float.
    """
    state = module.clika_state
    request, before = require_ranges(state, target)
    options = replace(request.options, optimize_for="size") if target.emulated_by else request.options
    other = replace(request, target=target, options=options)  # times on an emulated target decide nothing
    with CompilationLog.open(state.logs_dir) as log, outside_autocast():
        calibration = begin_calibration(graph, other, state.registry, before, log, has_data=False)
        batches = before.reservoir.batches
        pipeline = calibrate_graph(calibration, batches, other, state.registry, log, model=graph, are_given=False)
        return decide_quantization(pipeline, graph, other, state.registry, log)
