"""Calibrate a compiled module: with the user's data, with ranges that it holds, or with its tracing inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph
from clika_ref.compress.graph_quantization import begin_calibration, calibrate_graph, iter_graph_inputs
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.ir import Graph
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.ranks import SINGLE_PROCESS, Ranks, open_ranks
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

CALIBRATION_INTERRUPTED = (
    "cannot calibrate: calibration was interrupted after {}. Pass the same calibration_inputs to resume "
    "after them, or other ones to start again"
)

SAVED_WITHOUT_INPUTS = (
    "cannot calibrate: the module was saved with the ranges of {}, but without inputs. Pass the same "
    "calibration_inputs again, which are not run again, or other ones to start again; "
    "clika_save(..., keep_calibration_inputs=True) saves the inputs too"
)

NO_CALIBRATION_DATA = (
    "cannot calibrate: the module is a copy or was loaded, and has neither ranges nor tracing inputs. Pass "
    "calibration_inputs."
)

RANGES_OF_TRACING_INPUTS = "Calibration uses the {}, which may differ from real data. Pass calibration_inputs."


@dataclass(frozen=True)
class CalibrationArguments:
    """Arguments of `ClikaModule.clika_initialize_algorithms`, under their names."""

    quantization_settings: QuantizationSettings | None = None
    calibration_inputs: Iterable[Any] | None = None
    deployment_settings: BaseDeploymentSettings | None = None
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None
    data_transform_fn: Callable[[Any], Any] | None = None
    forward_fn: ForwardFn | None = None
    distributed_training_settings: DistributedTrainingSettings | None = None

    def data(self, unread: LazyDataset | None) -> LazyDataset | None:
        """Return the data to read: the given data, or else the data that compilation has not read."""
        if self.calibration_inputs is not None:
            return LazyDataset(self.calibration_inputs, self.data_transform_fn, self.forward_fn)
        if unread is None:
            return None
        return LazyDataset(
            unread.inputs, self.data_transform_fn or unread.transform, self.forward_fn or unread.forward_fn
        )


@dataclass(frozen=True)
class CalibratedRun:
    """A finished calibration, with all that the decision needs."""

    graph: Graph
    """The graph of the module, bound to its weights."""
    pipeline: QuantizationPipeline
    deployment: BaseDeploymentSettings
    request: QuantizationRequest
    log: CompilationLog
    ranks: Ranks

    def quantized(self, found: Quantization) -> QuantizationState:
        """Return the quantization of the module for a decision."""
        return QuantizationState(self.deployment.target, found.plan, self.pipeline.calibration.model, found)


@contextlib.contextmanager
def calibrate(module: CompiledModule, given: CalibrationArguments) -> Iterator[CalibratedRun]:
    """Calibrate a module; existing ranges stay until the new ones are complete.

    Raises:
        ModelError: there is no data, or it does not fit; or the settings cannot be satisfied.
        TargetError: the target computes in float, or no plugin provides it.
    """
    state = module.clika_state
    together = open_ranks(given.distributed_training_settings or state.distributed)
    with together as ranks, open_log(state, ranks) as log, outside_autocast():
        check_types(vars(given))
        known = state.calibration
        data = given.data(None if known else state.unread)
        deployment = state.choose_deployment(given.deployment_settings)
        request = QuantizationRequest(
            target_for(deployment, state.registry),
            given.quantization_settings or QuantizationSettings(),
            given.layer_quantization_settings or {},
            state.options,
        )
        graph = bind_graph(module)
        _check_same_request(graph, request, deployment, ranks, has_data=data is not None)
        pipeline = _run_calibration(module, graph, data, request, log, ranks=ranks)
        state.calibration = pipeline.calibration
        state.drop_calibration_weights()
        yield CalibratedRun(graph, pipeline, deployment, request, log, ranks)
        state.record_log(log)


def _check_same_request(
    graph: Graph, request: QuantizationRequest, deployment: BaseDeploymentSettings, ranks: Ranks, *, has_data: bool
) -> None:
    """Check that all ranks quantize the same model in the same way."""
    given = {"deployment_settings": deployment, "clika_compile_options": request.options}
    given |= {"quantization_settings": request.given, "layer_quantization_settings": {**request.layers}}
    given["whether there are calibration_inputs"] = has_data
    check_same_settings(given, ranks)
    if ranks.is_distributed:
        check_same_model(fingerprint(graph), ranks)


def _run_calibration(
    module: CompiledModule,
    graph: Graph,
    data: LazyDataset | None,
    request: QuantizationRequest,
    log: CompilationLog,
    *,
    ranks: Ranks,
) -> QuantizationPipeline:
    """Calibrate on data, or without any on the batches that the module holds."""
    state, known = module.clika_state, module.clika_state.calibration
    before = state.unfinished if data else known
    if ranks.is_distributed and data:
        before = None  # an interrupt stops each rank at another batch
    calibration = begin_calibration(graph, request, state.registry, before, log, has_data=data is not None)
    if data is not None:
        batches, total = _read_data(module, graph, data, calibration, log), data.count
    else:
        batches = known.reservoir.batches if known else _tracing_inputs(state, log)
        total = len(batches)
    reading = SINGLE_PROCESS if data is None and known else ranks  # existing ranges are those of all ranks
    options = {"total": total, "are_given": data is not None, "ranks": reading}
    try:
        pipeline = calibrate_graph(calibration, batches, request, state.registry, log, model=graph, **options)
    finally:  # an interrupt keeps the calibration, to resume it
        state.drop_calibration_weights()
    if data is None and known is not None:
        calibration.sizes = known.sizes  # includes batches that were not kept
    return pipeline


def open_log(state: CompiledState, ranks: Ranks) -> CompilationLog:
    """Open a log; of several processes, only rank 0 writes to the console."""
    return CompilationLog.open(state.logs_dir, console=ranks.is_first)


def _read_data(
    module: CompiledModule, graph: Graph, data: LazyDataset, calibration: Calibration, log: CompilationLog
) -> Iterator[list[torch.Tensor]]:
    """Read data for a calibration, which counts as unfinished until all data is read."""
    state = module.clika_state
    state.unfinished, state.unread = calibration, None
    yield from iter_graph_inputs(graph, state.signature, data.start().calls(make_callable(module)), log)
    state.unfinished = None
    if calibration.reservoir.batches:
        state.calibration = calibration


def _tracing_inputs(state: CompiledState, log: CompilationLog) -> list[list[torch.Tensor]]:
    """Return the tracing inputs, in place of data.

    Raises:
        ModelError: there are none; or a calibration was interrupted.
    """
    unfinished = state.unfinished
    if unfinished is not None and unfinished.table.batches:
        text = CALIBRATION_INTERRUPTED if unfinished.reservoir.batches else SAVED_WITHOUT_INPUTS
        raise ModelError(text.format(format_count(unfinished.table.batches, "batch")))
    if not state.examples:
        raise ModelError(NO_CALIBRATION_DATA)
    if not state.examples_are_data:
        log.warning(RANGES_OF_TRACING_INPUTS.format(format_count(len(state.examples), "tracing input")))
    return state.examples
