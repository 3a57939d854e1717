"""Quantize the pieces of a model: the data runs through the whole model once, and each piece sees its own inputs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clika_ref.capture.calibration_inputs import CalibrationInputs
from clika_ref.capture.eager import preserve_module
from clika_ref.capture.inputs import ModelCall
from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.state import bind_graph, set_quantization
from clika_ref.compress.calibration_pass import NO_BATCHES_ERROR, prepare_calibration, start_smoothing
from clika_ref.compress.graph_quantization import check_quantizable, decide_quantization, has_layers, make_stages
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.guards import check_inputs
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.distributed.ranks import SINGLE_PROCESS
from clika_ref.module.clika_module import ClikaModule
from clika_ref.partial_graphs.output_gains import OutputGains
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.pieces import DynamoGraph, Piece, dispatch, run_in_eager
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.decision import LAYER_COLUMNS, LayerReport
from clika_ref.quantization.layer_settings import split_layer_settings
from clika_ref.quantization.pipeline import QuantizationPipeline, choose_float_layers_together
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.reporting.tables import Table

NOT_REACHED = "the calibration data never reached it"


@dataclass
class _PieceCalibration:
    """The calibration of one piece."""

    module: ClikaModule
    graph: Graph
    """That of the module, bound to its weights."""
    calibration: Calibration
    request: QuantizationRequest
    registry: Registry
    log: CompilationLog

    def add(self, inputs: tuple[Any, ...]) -> None:
        """Observe a call of the piece."""
        tensors = self.module.clika_state.signature.graph_inputs(inputs)
        check_inputs(self.graph, tensors)
        start_smoothing(self.calibration, [tensors], self.request, self.registry, SINGLE_PROCESS)
        self.calibration.add(tensors)

    def make_stages(self) -> QuantizationPipeline:
        """Return the stages that decide how the piece is quantized."""
        return make_stages(self.calibration, self.request, self.registry, self.log, model=self.graph)

    def finish(self, stages: QuantizationPipeline) -> None:
        """Decide how to quantize the piece, and set the decision."""
        found = decide_quantization(stages, self.graph, self.request, self.registry, self.log)
        quantized = QuantizationState(self.request.target.name, found.plan, self.calibration.model, found)
        set_quantization(self.module, quantized, self.calibration, self.request)
        self.module.train(self.module.training)


@dataclass
class _DataPass:
    """Runs the model on the calibration data: each piece observes its inputs, and the first batch measures gains."""

    passes: Mapping[Piece, _PieceCalibration]
    gains: dict[Piece, float] = field(default_factory=dict[Piece, float])
    """By `OutputGains`; empty if the model does not run with gradients."""
    _measurement: OutputGains | None = None
    _is_first: bool = True
    _observed: Counter[Piece] = field(default_factory=Counter[Piece])
    """The calls of each piece observed in a run that failed with gradients."""

    def run(self, runner: Callable[..., Any], call: ModelCall) -> None:
        """Call the model on a batch."""
        is_first, self._is_first = self._is_first, False
        if not is_first or not self._measure_gains(runner, call.copy()):
            runner(*call.args, **call.kwargs)

    def _measure_gains(self, runner: Callable[..., Any], call: ModelCall) -> bool:
        """Call the model with gradients; return whether it runs with them, as with tensor.numpy() it does not."""
        self._measurement = OutputGains()
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True to a scalar")
                self.gains = self._measurement.measure(runner(*call.args, **call.kwargs))
        except ModelError:
            raise
        except Exception:  # noqa: BLE001 - if the model itself fails, it does so again
            return False
        finally:
            self._measurement = None
        self._observed.clear()
        return True

    def observe(self, piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:
        """Observe the inputs of a call of a piece, and run it in eager."""
        with torch.no_grad():
            if self._measurement is None and self._observed[piece]:
                self._observed[piece] -= 1
            elif piece in self.passes:
                self._observed[piece] += self._measurement is not None
                self.passes[piece].add(tuple(_detach(x) for x in graph.inputs_of(values)))
            if self._measurement is None:
                return run_in_eager(piece, graph, values)
        return self._measurement.watch(piece, run_in_eager(piece, graph, values))


def _detach(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def quantize_pieces(
    state: PartialState, data: CalibrationInputs, request: QuantizationRequest, log: CompilationLog
) -> None:
    """Calibrate all pieces in one pass over the data, and quantize each.

    Args:
        state: of the module.
        data: read once.
        request: the choices of the user; layer settings may name layers of any piece.
        log: receives the report.

    Raises:
        ModelError: there is no data, or it does not fit a piece; or a key of the layer settings matches nothing.
        TargetError: the target computes in float.
    """
    passes = _prepare(state.pieces, request, state.registry, log)
    runner, callee, total = state.runner, state.callee, data.count

    data_pass = _DataPass(passes)
    runner.table.run = data_pass.observe
    count = 0
    try:
        with log.stage("Calibrating") as stage, preserve_module(callee):
            for count, call in enumerate(data.calls(callee), 1):
                own = call.copy()
                try:
                    data_pass.run(runner, own)
                except ModelError as error:
                    raise ModelError(f"calibration batch {count}: {error}") from error
                stage.update(f"{count:,}{'' if total is None else f'/{total:,}'} batches")
            if not count:
                raise ModelError(NO_BATCHES_ERROR)
            stage.done(f"{format_count(count, 'batch')} through {format_count(len(passes), 'piece')}")
    finally:
        runner.table.run = dispatch
    with log.stage("Quantizing") as stage:
        observed = {piece: part for piece, part in passes.items() if part.calibration.table.batches}
        made = {piece: part.make_stages() for piece, part in observed.items()}
        if not request.settings.prefer_weights_only_quantization:
            choose_float_layers_together([*made.values()], [data_pass.gains.get(piece, 1.0) for piece in made])
        for number, (piece, stages) in enumerate(made.items(), 1):
            stage.update(f"{number}/{len(made)} {piece.label}")
            observed[piece].finish(stages)
        layers = list_layers(runner.table.pieces)
        quantized = sum(not layer.reason for layer in layers)
        stage.done(f"{quantized:,} of {format_count(len(layers), 'layer')} quantized")
    log.table("Quantization", Table(layers, LAYER_COLUMNS))
    for piece, part in passes.items():
        if piece not in observed:
            set_quantization(part.module, None, None)
            log.warning(f"{piece.label} stays in float: {NOT_REACHED}")
        for warning in part.log.warnings:
            log.warning(f"{piece.label}: {warning}")


def _prepare(
    pieces: Iterable[Piece], request: QuantizationRequest, registry: Registry, log: CompilationLog
) -> dict[Piece, _PieceCalibration]:
    """Return a calibration for each compiled piece that has a layer to quantize, or whose settings are checked."""
    compiled = {piece: piece.module for piece in pieces if piece.module is not None}
    graphs = {piece: bind_graph(module) for piece, module in compiled.items()}
    layers = split_layer_settings([*graphs.values()], request.layers)
    passes: dict[Piece, _PieceCalibration] = {}
    without_tail, last = replace(request.given, skip_tail_quantization=None), next(reversed(graphs), None)
    for (piece, graph), own_layers in zip(graphs.items(), layers, strict=True):
        own = replace(request, layers=own_layers, given=request.given if piece is last else without_tail)
        calibration = prepare_calibration(graph, own, registry)
        quiet = CompilationLog()
        if has_layers(calibration.graph, own):
            check_quantizable(calibration, own, registry, quiet, model=graph)
            passes[piece] = _PieceCalibration(compiled[piece], graph, calibration, own, registry, quiet)
    if not passes:
        log.warning(f"no piece has a layer that {request.target.name} quantizes: the model stays in float")
    return passes


def list_layers(pieces: Iterable[Piece]) -> list[LayerReport]:
    """Return the decision for each layer of all pieces."""
    modules = [piece.module for piece in pieces if piece.module is not None]
    found = [module.clika_state.quantized for module in modules]
    return [layer for quantized in found if quantized and quantized.found for layer in quantized.found.layers]
