"""Compile a model that no tracer captures as one graph: record its pieces, and compile each."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from clika_ref.capture.calibration_inputs import CalibrationInputs
from clika_ref.capture.callables import TracedCallable, make_callable
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.messages import CaptureError
from clika_ref.core.errors import ModelError, format_count
from clika_ref.distributed.ranks import SINGLE_PROCESS
from clika_ref.module.clika_module import ClikaModule
from clika_ref.partial_graphs.calibration import quantize_pieces
from clika_ref.partial_graphs.partial_module import PartialClikaModule
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.pieces import Piece, dispatch, names_by_id
from clika_ref.partial_graphs.recording import Recording, record_pieces
from clika_ref.pipeline import CompileContext, compile_callee, make_quantization_request
from clika_ref.reporting.log import CompilationLog


def compile_in_pieces(
    context: CompileContext, calls: list[ModelCall], data: CalibrationInputs | None, error: CaptureError
) -> torch.nn.Module | None:
    """Compile a model in pieces; return None at the end of a dry run.

    Args:
        context: the compilation, which could not capture one graph.
        calls: the tracing inputs.
        data: the calibration data, of which some may be among the tracing inputs.
        error: why one graph cannot be captured.

    Raises:
        ModelError: the arguments need one graph; a function needs too many graphs; or ``error``, if the model does not
            run with Dynamo either.
    """
    _reject_arguments(context, error)
    context = replace(context, callee=_own_callee(context), fallback=None)
    log, arguments = context.log, context.arguments
    log.detail(f"Compiling in pieces, as {error}")
    recording = _record(context, calls, error)
    _compile_pieces(recording, context)
    where = arguments.deployment_settings, arguments.clika_compile_options, arguments.logs_dir
    state = PartialState(recording.runner, context.callee, recording.breaks, context.registry, *where)
    state.unread = arguments.unread
    module = PartialClikaModule(state)
    request = make_quantization_request(context)
    if request is not None and data is not None:
        quantize_pieces(state, data, request, log)
    breaks = format_count(len(recording.breaks), "graph break")
    log.show(f"{context.callee.name} has {breaks}; print(module.clika_breaks) lists them")
    log.detail(str(module.clika_breaks))
    state.timings = log.timings
    return None if arguments.is_dry_run else module


def _record(context: CompileContext, calls: list[ModelCall], error: CaptureError) -> Recording:
    with context.log.stage("Recording") as stage:
        try:
            recording = record_pieces(context.callee, calls, dynamic=context.arguments.dynamic is not False)
        except ModelError:
            raise
        except Exception as failure:
            raise error from failure
        stage.done(format_count(len(recording.runner.table.pieces), "piece"))
    return recording


def _compile_pieces(recording: Recording, context: CompileContext) -> None:
    pieces, log = recording.runner.table.pieces, context.log
    with log.stage("Compiling pieces") as stage:
        for piece in pieces:
            stage.update(f"{piece.number + 1}/{len(pieces)} {piece.label}")
            log.detail(f"Piece {piece.number}: {piece.label}")
            _compile_piece(piece, recording, context)
        compiled = [piece.module for piece in pieces if piece.module is not None]
        nodes = sum(len(module.clika_state.graph) for module in compiled)
        stage.done(f"{format_count(nodes, 'node')} in {format_count(len(compiled), 'piece')}")
    recording.runner.table.run = dispatch


def _reject_arguments(context: CompileContext, error: CaptureError) -> None:
    """Reject what needs one graph."""
    arguments, options = context.arguments, context.arguments.clika_compile_options
    needs = {
        "pruning_settings": arguments.pruning_settings is not None,
        "global_lora_settings": options.global_lora_settings is not None,
        "ranges_file": bool(options.ranges_file),
        "distributed_training_settings": context.ranks.is_distributed,
        "a function": context.callee.is_function,
    }
    found = [name for name, is_given in needs.items() if is_given]
    if found:
        raise ModelError(
            f"cannot compile {context.callee.name} in pieces: {' and '.join(found)} needs one graph. Compile "
            f"without it, or remove the cause: {error}"
        ) from error


def _own_callee(context: CompileContext) -> TracedCallable:
    """Return the callable to run in pieces: the given one, or one on a copy of its module if the original is kept."""
    callee = context.callee
    if not callee.is_preserved:
        return callee
    module = copy.deepcopy(callee.module)
    function = callee.function.__func__.__get__(module)  # type: ignore[attr-defined] - a bound method
    return replace(callee, module=module, function=function, is_preserved=False)


def _compile_piece(piece: Piece, recording: Recording, context: CompileContext) -> None:
    """Compile a piece in float, or note why it stays in eager."""
    graph, values = recording.graphs.pop(piece)
    names = names_by_id(context.callee.module)
    arguments = replace(
        context.arguments,
        tracing_inputs=piece.calls,
        calibration_inputs=None,
        data_transform_fn=None,
        forward_fn=None,
        quantization_settings=None,
        discard_input_model=True,
        is_dry_run=False,
        skip_eval_set_mode=True,
        graph_name=piece.scope or piece.key.position.function,
    )
    log = CompilationLog()
    try:
        callee = make_callable(graph.rebuild(values, names))
        compiled = compile_callee(CompileContext(callee, arguments, context.registry, log, SINGLE_PROCESS))
    except CaptureError as error:
        piece.eager_reason = str(error)
        context.log.warning(f"{piece.label} runs in eager: {error}")
    else:
        assert isinstance(compiled, ClikaModule)
        piece.module = compiled.train(context.callee.module.training)
    piece.calls.clear()
    for warning in log.warnings:
        context.log.warning(f"{piece.label}: {warning}")
