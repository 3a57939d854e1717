"""Quantization of a compiled graph: calibrate it on data, decide how to quantize it, and report."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.signature import Signature
from clika_ref.compiled.latency import LayerTimer
from clika_ref.compiled.lowering import check_supported
from clika_ref.compress.calibration_pass import apply_table_smoothing, prepare_calibration, run_calibration
from clika_ref.compress.latency_choice import choose_fastest
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.guards import check_inputs
from clika_ref.core.ir import Graph, walk, walk_values
from clika_ref.core.registry import Registry
from clika_ref.distributed.decisions import decide_on_rank0
from clika_ref.distributed.ranks import SINGLE_PROCESS, Ranks
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.qdq.recurrent_layers import list_dynamic_layers
from clika_ref.quantization.report import log_quantization
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.torch_internals.trees import pytree

RECALIBRATE_HINT = "Name another file in ranges_file, or remove this one, to calibrate again."


@contextlib.contextmanager
def use_ranges_file(
    file: str | PathLike[str],
    calibration: Calibration,
    registry: Registry,
    log: CompilationLog,
    recalibrate: Callable[[], Calibration],
) -> Iterator[None]:
    """Start with the ranges in a file, if it exists, and save the new ranges there, also after an interrupt."""
    if not file:
        yield
        return
    path = Path(file)
    if path.exists():
        calibration.restart_with_ranges(_load_ranges(path, calibration), recalibrate().graph)
        apply_table_smoothing(calibration, registry)
        unknown = _unknown_values(calibration)
        if unknown:
            raise ModelError(
                f"cannot use the ranges of {path}: they are for another target, and the model has no activation "
                f"{unknown[0]!r} for this one. {RECALIBRATE_HINT}"
            )
    try:
        yield
    finally:
        if calibration.table.batches:
            calibration.table.save(path)
            log.detail(f"The ranges of {format_count(calibration.table.batches, 'batch')} are in {path}")


def _load_ranges(path: Path, calibration: Calibration) -> RangeTable:
    try:
        found = RangeTable.load(path)
    except ModelError as error:
        error.add_note(RECALIBRATE_HINT)
        raise
    if found.model != calibration.model:
        raise ModelError(
            f"cannot use the ranges of {path}: they are of another model, or of other weights. {RECALIBRATE_HINT}"
        )
    smoothing_purpose = calibration.table.smoothing_purpose
    if found.smoothing_purpose != smoothing_purpose:
        raise ModelError(
            f"cannot use the ranges of {path}: its SmoothQuant factors are for {found.smoothing_purpose}, not for "
            f"{smoothing_purpose}. {RECALIBRATE_HINT}"
        )
    return found


def iter_graph_inputs(
    graph: Graph, signature: Signature, calls: Iterable[ModelCall], log: CompilationLog
) -> Iterator[list[torch.Tensor]]:
    """Yield the inputs of a graph in each call; a smaller last one is left out with a warning.

    Raises:
        ModelError: a call does not fit the graph; the message gives its number.
    """
    problem: ModelError | None = None
    before: list[torch.Tensor] = []
    for number, call in enumerate(calls, 1):
        if problem is not None:
            raise problem
        try:
            inputs = signature.graph_inputs(signature.flatten(call.args, call.kwargs))
            check_inputs(graph, inputs)
        except ModelError as error:
            problem = ModelError(f"calibration batch {number}: {error}")
            problem.__cause__ = error
            if not before or not _is_remainder(call, before):
                raise problem from error
        else:
            before = inputs
            yield inputs
    if problem is not None:
        log.warning(f"{problem}. The last batch is skipped.")


def _is_remainder(call: ModelCall, before: Sequence[torch.Tensor]) -> bool:
    """Return whether a call is like the one before, but with fewer samples: the remainder of the data."""
    leaves: list[Any] = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if [(t.dtype, t.ndim, t.shape[1:]) for t in tensors] != [(t.dtype, t.ndim, t.shape[1:]) for t in before]:
        return False
    return any(t.ndim and len(t) < len(b) for t, b in zip(tensors, before, strict=True))


def decide_quantization(
    stages: QuantizationPipeline,
    graph: Graph,
    request: QuantizationRequest,
    registry: Registry,
    log: CompilationLog,
    *,
    ranks: Ranks = SINGLE_PROCESS,
) -> Quantization:
    """Decide how to quantize a calibrated graph, and log the result with the reasons.

    Args:
        stages: of the graph.
        graph: of the module, before lowering.
        request: the choices of the user.
        registry: the plugins.
        log: receives the report.
        ranks: the processes that use the decision of the first one.

    Raises:
        ModelError: the target supports none of the weight widths or block sizes in the settings.
        TargetError: layers are to be timed, and the target cannot run them.
    """

    def decide_here() -> Quantization:
        if request.options.optimize_for == "latency":
            return choose_fastest(stages, graph, request, registry, log)
        return stages.decide()

    if request.target.scheme_note:
        log.show(f"{request.target.name}: {request.target.scheme_note}")
    with log.stage("Quantizing") as stage:
        values = sorted(stages.calibration.table.values)
        for number, name in enumerate(values, 1):
            log.detail(f"Processing Quantization statistics {number}/{len(values)}: '{name}'")
        found = decide_on_rank0(decide_here, stages.scheme, ranks)
        log_quantization(found, log)
        stage.done(found.summarize())
    return found


RESTART_WARNING = (
    "The data begins with another batch than the interrupted pass: calibration starts again, without its {}. "
    "To resume that pass, give the same data in the same order."
)

OTHER_FIRST_BATCH_WARNING = (
    "The data begins with another batch than the ranges in {0}: these ranges of {1} stay, and as many "
    "batches are skipped. If it is not the same data in another order, remove the file, or name another one in "
    "ranges_file."
)


RANGES_FILE_WITH_RANKS_ERROR = (
    "cannot calibrate with ranges_file={!r}: the file is for one process, and several calibrate together. Remove "
    "the option, or calibrate in one process."
)


def calibrate_graph(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    request: QuantizationRequest,
    registry: Registry,
    log: CompilationLog,
    *,
    model: Graph,
    total: int | None = None,
    are_given: bool = True,
    ranks: Ranks = SINGLE_PROCESS,
) -> QuantizationPipeline:
    """Calibrate a graph on batches; return the stages that decide how it is quantized.

    A calibration that counts batches already resumes after them; if the first batch is another one, it restarts.

    Args:
        calibration: of the graph (`prepare_calibration`). It counts each batch at once: an interrupt loses none.
        batches: inputs of the graph, read once.
        request: the choices of the user.
        registry: the plugins.
        log: receives the report.
        model: the graph before lowering.
        total: the number of batches, if known.
        ranges_file: where to load and save the ranges; empty for no file.
        are_given: whether the batches are the user's data, not those that an earlier pass kept.
        ranks: the processes that each read a part of the data.

    Raises:
        ModelError: a key of the layer settings matches nothing, the target does not support a width, or several
            processes use a ranges file.
        TargetError: layers are to be timed, and the target cannot run them.
    """
    ranges_file = request.options.ranges_file if are_given else ""
    if ranks.is_distributed and ranges_file:
        raise ModelError(RANGES_FILE_WITH_RANKS_ERROR.format(ranges_file))
    check_quantizable(calibration, request, registry, log, model=model)
    recalibrate = partial(prepare_calibration, model, request, registry)
    with use_ranges_file(ranges_file, calibration, registry, log, recalibrate):
        known = _check_first_batch(calibration, batches, log, recalibrate, ranges_file) if are_given else batches
        run_calibration(calibration, known, request, registry, log, total=total, ranks=ranks)
    return make_stages(calibration, request, registry, log, model=model, ranks=ranks)


def check_quantizable(
    calibration: Calibration, request: QuantizationRequest, registry: Registry, log: CompilationLog, *, model: Graph
) -> None:
    """Check a request before data is read, and warn of settings without effect.

    Args:
        calibration: of the graph.
        request: the choices of the user.
        registry: the plugins.
        log: receives the warnings.
        model: the graph before lowering.

    Raises:
        ModelError: a key of the layer settings matches nothing, or the target does not support a width.
        TargetError: layers are to be timed, and the target cannot run them.
    """
    _make_pipeline(calibration, request, registry, model)
    if request.options.optimize_for == "latency":
        check_supported(calibration.graph, request.target)  # a graph that does not run cannot be timed
    if not has_layers(calibration.graph, request):
        log.warning(
            f"{calibration.graph.name} has no layer that {request.target.name} quantizes, and stays in float. It "
            f"quantizes {', '.join(sorted(_quantized_operators(request)))}."
        )
    if request.overflow_warning:
        log.warning(request.overflow_warning)
    if request.ineffective_options:
        log.warning(f"{', '.join(request.ineffective_options)} has no effect with weight-only quantization")


def make_stages(
    calibration: Calibration,
    request: QuantizationRequest,
    registry: Registry,
    log: CompilationLog,
    *,
    model: Graph,
    ranks: Ranks = SINGLE_PROCESS,
) -> QuantizationPipeline:
    """Return the stages that decide how a calibrated graph is quantized; layers are timed first, if requested.

    Args:
        calibration: of the graph, with all batches.
        request: the choices of the user.
        registry: the plugins.
        log: receives the duration of the timing.
        model: the graph before lowering.
        ranks: the processes that calibrated together; the first one times.
    """
    stages = _make_pipeline(calibration, request, registry, model)  # SmoothQuant may have added nodes
    is_timed = request.options.optimize_for == "latency" and not request.settings.prefer_weights_only_quantization
    if is_timed and ranks.is_first and has_layers(calibration.graph, request):
        with log.stage("Timing") as stage:
            timer = LayerTimer(request.target, request.scheme, registry.operators)
            stages.slow_layers = timer.find_slow_layers(calibration.graph, calibration.reservoir.batches[0])
            stage.done(f"{format_count(len(stages.slow_layers), 'layer')} slower when quantized")
    return stages


def has_layers(graph: Graph, request: QuantizationRequest) -> bool:
    """Return whether a lowered graph has a layer that the target of a request quantizes."""
    return any(node.op_type in _quantized_operators(request) for node in walk(graph))


def _quantized_operators(request: QuantizationRequest) -> Collection[str]:
    scheme = request.scheme
    weight_only = scheme.weights_only if request.settings.prefer_weights_only_quantization else None
    if weight_only is None:
        return scheme.layers | list_dynamic_layers(scheme).keys()
    return weight_only.layers | scheme.dynamic.keys()


def _make_pipeline(
    calibration: Calibration, request: QuantizationRequest, registry: Registry, model: Graph
) -> QuantizationPipeline:
    layer_settings = resolve_node_settings(calibration.graph, request.settings, request.layers, model)
    try:
        return QuantizationPipeline(
            calibration, request.scheme, layer_settings, request.settings, registry.operators, request.options
        )
    except ModelError as error:
        raise ModelError(f"for {request.target.name}, {error}") from error


def _check_first_batch(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    log: CompilationLog,
    recalibrate: Callable[[], Calibration],
    ranges_file: str | PathLike[str],
) -> Iterable[Sequence[torch.Tensor]]:
    """Return the batches; if the first is not that of the ranges, log a warning and restart the ranges.

    Ranges from a file stay: the user wants them, and loaders may shuffle.
    """
    if not calibration.table.batches:
        return batches
    later = iter(batches)
    first = [*itertools.islice(later, 1)]
    if first and not calibration.is_first_batch(first[0]):
        if ranges_file:
            log.warning(OTHER_FIRST_BATCH_WARNING.format(ranges_file, format_count(calibration.table.batches, "batch")))
        else:
            log.warning(RESTART_WARNING.format(format_count(calibration.table.batches, "batch")))
            calibration.restart(recalibrate().graph)
    return itertools.chain(first, later)


CHANGED_WEIGHTS_WARNING = "The weights have changed since calibration was interrupted: its {} must run again."


def begin_calibration(
    graph: Graph,
    request: QuantizationRequest,
    registry: Registry,
    before: Calibration | None,
    log: CompilationLog,
    *,
    has_data: bool,
) -> Calibration:
    """Return a calibration of a compiled graph that starts with the results of an earlier one.

    Ranges for another target are valid too, unless the passes of that target left other values. If they are not, or if
    channels were smoothed for another quantization, the calibration restarts.

    Args:
        graph: of the module.
        request: the choices of the user.
        registry: the plugins.
        before: an interrupted pass over the same data if data is given; otherwise the last complete pass.
        log: receives the report.
        has_data: whether data is given; otherwise the kept batches are used.
    """
    if before is not None and has_data and before.table.batches and before.table.model != fingerprint(graph):
        log.warning(CHANGED_WEIGHTS_WARNING.format(format_count(before.table.batches, "batch")))
    elif before is not None:
        if before.table.smoothing_purpose == request.smoothing_purpose:
            found = prepare_calibration(graph, request, registry, before)
            if not _unknown_values(found):
                return found
        kept, counted = len(before.reservoir.batches), before.table.batches
        if not has_data and kept < counted:
            log.warning(
                f"The ranges of {format_count(counted, 'batch')} cannot be used again, as their SmoothQuant factors "
                f"are for {before.table.smoothing_purpose}: calibration runs again on "
                f"{format_count(kept, 'stored batch')}. Pass calibration_inputs to use all."
            )
    return prepare_calibration(graph, request, registry)


def _unknown_values(calibration: Calibration) -> list[str]:
    """Return the value names in a range table that its graph does not have."""
    made = {value.name for value in walk_values(calibration.graph)}
    return sorted(calibration.table.values.keys() - made)
