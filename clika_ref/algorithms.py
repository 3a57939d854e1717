"""Quantization of a compiled graph: calibrate it on data, decide how to quantize it, and report."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.calibrating import calibrate, smooth_as_found, to_calibrate
from clika_ref.capture.inputs import ModelCall
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.distributed.deciding import decided_together
from clika_ref.distributed.ranks import ALONE, Ranks
from clika_ref.exporting.export import refuse
from clika_ref.input_checks import check_inputs
from clika_ref.latency import SLOWER, LayerTimer, ratio_to_float
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.fingerprint import fingerprint
from clika_ref.quantization.layers import choices
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.report import in_one_line, tell
from clika_ref.quantization.stages import Stages
from clika_ref.reporting.log import CompilationLog
from clika_ref.signature import Signature
from clika_ref.wanted import Wanted

ANEW = "name another file in ranges_file, or remove this one, to calibrate anew"


@contextlib.contextmanager
def kept_in(
    file: str | PathLike[str],
    calibration: Calibration,
    registry: Registry,
    log: CompilationLog,
    anew: Callable[[], Calibration],
) -> Iterator[None]:
    """Start with the ranges in a file, if it exists, and save the new ranges there, also after an interrupt."""
    if not file:
        yield
        return
    path = Path(file)
    if path.exists():
        calibration.begin_with(_ranges_in(path, calibration), anew().graph)
        smooth_as_found(calibration, registry)
        strange = _strange_values(calibration)
        if strange:
            msg = f"{path} holds ranges for another target: for this one the model has no value {strange[0]!r}; {ANEW}"
            raise ModelError(msg)
    try:
        yield
    finally:
        if calibration.table.batches:
            calibration.table.save(path)
            log.detail(f"The ranges of {calibration.table.batches:,} batches are in {path}")


def _ranges_in(path: Path, calibration: Calibration) -> RangeTable:
    found = RangeTable.load(path)
    if found.model != calibration.model:
        msg = f"{path} holds the ranges of another model, or of this one with other weights; {ANEW}"
        raise ModelError(msg)
    wanted = calibration.table.smoothed_for
    if found.smoothed_for != wanted:
        msg = f"{path} holds the ranges of channels smoothed for {found.smoothed_for}, not for {wanted}; {ANEW}"
        raise ModelError(msg)
    return found


def batches_of(
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
            if not before or not _is_smaller(call, before):
                raise problem from error
        else:
            before = inputs
            yield inputs
    if problem is not None:
        log.warning(f"{problem}. It is the last one, and is left out")


def _is_smaller(call: ModelCall, before: Sequence[torch.Tensor]) -> bool:
    """Return whether a call is like the one before, but with fewer samples: the remainder of the data."""
    leaves: list[Any] = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if [(t.dtype, t.ndim, t.shape[1:]) for t in tensors] != [(t.dtype, t.ndim, t.shape[1:]) for t in before]:
        return False
    return any(t.ndim and len(t) < len(b) for t, b in zip(tensors, before, strict=True))


def decide(
    stages: Stages, graph: Graph, wanted: Wanted, registry: Registry, log: CompilationLog, *, ranks: Ranks = ALONE
) -> Quantization:
    """Decide how to quantize a calibrated graph, and log the result with the reasons.

    Args:
        stages: of the graph.
        graph: of the module, before lowering.
        wanted: the choices of the user.
        registry: the plugins.
        log: receives the report.
        ranks: the processes that use the decision of the first one.
    """

    def found_here() -> Quantization:
        found = stages.decided()
        is_timed = wanted.options.optimize_for == "latency" and not found.plan.is_empty
        return _fast(found, stages, graph, wanted, registry) if is_timed else found

    with log.stage("Quantizing") as stage:
        values = sorted(stages.calibration.table.values)
        for number, name in enumerate(values, 1):
            log.detail(f"Processing Quantization statistics {number}/{len(values)}: '{name}'")
        found = decided_together(found_here, stages.scheme, ranks)
        tell(found, log)
        stage.done(in_one_line(found))
    return found


def _fast(found: Quantization, stages: Stages, graph: Graph, wanted: Wanted, registry: Registry) -> Quantization:
    """Return a quantization without the parts that are slower than float: low-bit weights of layers, or all of it."""
    inputs = stages.calibration.reservoir.batches[0]
    if found.plan.compressed:
        timer = LayerTimer(wanted.target, wanted.scheme, registry.operators)
        slow = timer.slower(stages.calibration.graph, inputs, found.plan.compressed)
        found = replace(stages, slow=slow).decided() if slow else found
    if found.plan.is_empty:
        return found
    ratio = ratio_to_float(graph, found.plan, wanted.target, registry, inputs)
    reason = f"the whole model takes {ratio:.2f} times as long in integers as in float"
    return replace(stages, slow=dict.fromkeys(stages.chosen, reason)).decided() if ratio > SLOWER else found


OTHER = (
    "The data begins with another batch than the pass that was interrupted after {:,}: ranges are found anew; to go on "
    "with that pass, give the same data in the same order"
)

SHUFFLED = (
    "The data begins with another batch than the ranges in {0} do: these stay, and as many batches, {1:,}, are not "
    "run; where it is not the same data in another order, remove the file, or name another one in ranges_file"
)


OF_ONE = (
    "ranges_file={!r} saves the ranges of one process, and several calibrate together here; leave it out, or calibrate "
    "in one process"
)


def calibrated(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    wanted: Wanted,
    registry: Registry,
    log: CompilationLog,
    *,
    model: Graph,
    total: int | None = None,
    ranges_file: str | PathLike[str] = "",
    are_given: bool = True,
    ranks: Ranks = ALONE,
) -> Stages:
    """Calibrate a graph on batches; return the stages that decide how it is quantized.

    A calibration that counts batches already resumes after them; if the first batch is another one, it restarts.

    Args:
        calibration: of the graph (`to_calibrate`); it counts each batch at once, so that an interrupt loses none.
        batches: inputs of the graph, read once.
        wanted: the choices of the user.
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
    if ranks.are_several and ranges_file:
        raise ModelError(OF_ONE.format(ranges_file))
    _stages_of(calibration, wanted, registry, model)  # reject unsupported settings before the data is read
    if wanted.options.optimize_for == "latency":
        refuse(calibration.graph, wanted.target)  # a graph that does not run cannot be timed
    if wanted.idle:
        log.warning(f"{', '.join(wanted.idle)} changes nothing where weights alone are quantized")
    anew = partial(to_calibrate, model, wanted, registry)
    with kept_in(ranges_file, calibration, registry, log, anew):
        known = _known_again(calibration, batches, log, anew, ranges_file) if are_given else batches
        calibrate(calibration, known, wanted, registry, log, total=total, ranks=ranks)
    stages = _stages_of(calibration, wanted, registry, model)  # smoothing may have added nodes
    is_timed = wanted.options.optimize_for == "latency" and not wanted.settings.prefer_weights_only_quantization
    if is_timed and ranks.is_first:
        with log.stage("Timing") as stage:
            timer = LayerTimer(wanted.target, wanted.scheme, registry.operators)
            stages.slow = timer.slower(calibration.graph, calibration.reservoir.batches[0])
            stage.done(f"{len(stages.slow):,} layers are slower in integers, and stay float")
    return stages


def _stages_of(calibration: Calibration, wanted: Wanted, registry: Registry, model: Graph) -> Stages:
    chosen = choices(calibration.graph, wanted.settings, wanted.layers, model)
    try:
        return Stages(calibration, wanted.scheme, chosen, wanted.settings, registry.operators, wanted.options)
    except ModelError as error:
        msg = f"for {wanted.target.name}, {error}"
        raise ModelError(msg) from error


def _known_again(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    log: CompilationLog,
    anew: Callable[[], Calibration],
    ranges_file: str | PathLike[str],
) -> Iterable[Sequence[torch.Tensor]]:
    """Return the batches; if the first is not that of the ranges, log a warning and restart the ranges.

    Ranges from a file stay: the user wants them, and loaders may shuffle.
    """
    if not calibration.table.batches:
        return batches
    later = iter(batches)
    first = [*itertools.islice(later, 1)]
    if first and not calibration.begins_with(first[0]):
        if ranges_file:
            log.warning(SHUFFLED.format(ranges_file, calibration.table.batches))
        else:
            log.warning(OTHER.format(calibration.table.batches))
            calibration.begin_anew(anew().graph)
    return itertools.chain(first, later)


TRAINED = "The weights have changed since the pass over the data was interrupted: its {:,} batches are run again"


def begun(
    graph: Graph, wanted: Wanted, registry: Registry, before: Calibration | None, log: CompilationLog, *, has_data: bool
) -> Calibration:
    """Return a calibration of a compiled graph that starts with the results of an earlier one.

    Ranges for another target are valid too, unless the passes of that target left other values. If they are not, or if
    channels were smoothed for another quantization, the calibration restarts.

    Args:
        graph: of the module.
        wanted: the choices of the user.
        registry: the plugins.
        before: an interrupted pass over the same data if data is given; otherwise the last complete pass.
        log: receives the report.
        has_data: whether data is given; otherwise the kept batches are used.
    """
    if before is not None and has_data and before.table.batches and before.table.model != fingerprint(graph):
        log.warning(TRAINED.format(before.table.batches))
    elif before is not None:
        if before.table.smoothed_for == wanted.smoothed_for:
            found = to_calibrate(graph, wanted, registry, before)
            if not _strange_values(found):
                return found
        kept, counted = len(before.reservoir.batches), before.table.batches
        if not has_data and kept < counted:
            log.warning(
                f"The ranges of {counted:,} batches, smoothed for {before.table.smoothed_for}, do not serve here: they "
                f"are found anew from the first {kept:,}, which are kept; give calibration_inputs to have all counted"
            )
    return to_calibrate(graph, wanted, registry)


def _strange_values(calibration: Calibration) -> list[str]:
    """Return the value names in a range table that its graph does not have."""
    graph = calibration.graph
    made = {v.name for v in graph.inputs} | {v.name for node in graph.nodes for v in node.outputs}
    return sorted(calibration.table.values.keys() - made)
