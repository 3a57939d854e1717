"""What makes integers of a compiled graph: calibrate it on data, decide what is quantized, and tell."""

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
    """Begin with the ranges in a file, where it exists, and save there what is found, also after an interrupt."""
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
    """Yield the inputs of a graph in each call; a last one that is merely smaller is left out with a warning.

    Raises:
        ModelError: a call does not fit the graph; the message says which.
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
    """Whether a call has fewer samples than the one before, and is like it otherwise: what is left of the data."""
    leaves: list[Any] = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if [(t.dtype, t.ndim, t.shape[1:]) for t in tensors] != [(t.dtype, t.ndim, t.shape[1:]) for t in before]:
        return False
    return any(t.ndim and len(t) < len(b) for t, b in zip(tensors, before, strict=True))


def decide(
    stages: Stages, graph: Graph, wanted: Wanted, registry: Registry, log: CompilationLog, *, ranks: Ranks = ALONE
) -> Quantization:
    """Decide what of a calibrated graph becomes integers, and write into the log what, and why not.

    Args:
        stages: of the graph.
        graph: of the module, as it is stored.
        wanted: what the user chose.
        registry: the plugins.
        log: what it tells.
        ranks: the processes that take what the first of them decides.
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
    """Return what is left in integers of what was found, without what is slower so: weights in few bits, or all."""
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
    """Calibrate a graph on batches; return the stages that decide what of it becomes integers.

    A calibration that counts batches already goes on behind as many; where the first is another one, it begins anew.

    Args:
        calibration: of the graph (`to_calibrate`); it counts each batch at once, so that an interrupt loses none.
        batches: inputs of the graph, read once.
        wanted: what the user chose.
        registry: the plugins.
        log: what it tells.
        model: the graph as it is stored, before it was made what is going to be written.
        total: how many batches there are, where that is known.
        ranges_file: where to save the ranges, and to begin with those that are there; nowhere where empty.
        are_given: whether the batches are the user's data, and not those that a former pass kept.
        ranks: the processes that each read a part of the data.

    Raises:
        ModelError: a key of the settings of layers matches nothing, a width is asked for that the target lacks, or
            several processes are to begin with the ranges in a file.
        TargetError: layers are to be timed, and the target cannot run them.
    """
    if ranks.are_several and ranges_file:
        raise ModelError(OF_ONE.format(ranges_file))
    _stages_of(calibration, wanted, registry, model)  # what cannot be had is refused before data is read
    if wanted.options.optimize_for == "latency":
        refuse(calibration.graph, wanted.target)  # what does not run takes no time that could be told
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
    """Return batches; where the first is not that which the ranges began with, say so, and begin the ranges anew.

    Those of a file are what the user wants: they stay, as loaders may shuffle.
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
    """Return what to quantize a compiled graph with, which begins with what another calibration has found.

    Ranges of the graph for another target serve as well, unless that one's passes left other values. Where they do
    not, or are of channels that were smoothed for something else, it begins anew.

    Args:
        graph: of the module.
        wanted: what the user chose.
        registry: the plugins.
        before: a pass over the same data that was interrupted, where data is given; otherwise the last one that was
            not.
        log: what it tells.
        has_data: whether data is given; otherwise the batches that are kept have to do.
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
    """Return the names in a range table of values that its graph does not have."""
    graph = calibration.graph
    made = {v.name for v in graph.inputs} | {v.name for node in graph.nodes for v in node.outputs}
    return sorted(calibration.table.values.keys() - made)
