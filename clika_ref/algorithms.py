"""What makes integers of a compiled graph: calibrate it on data, decide what is quantized, and tell."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clika_ref.capture.inputs import ModelCall
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.exporting.export import lower, refuse
from clika_ref.formulas import Formula
from clika_ref.input_checks import check_inputs
from clika_ref.latency import SLOWER, LayerTimer, ratio_to_float
from clika_ref.lora.lowering import restore_beside, set_aside
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.fingerprint import fingerprint
from clika_ref.quantization.layers import choices
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.report import LAYERS, WHAT_IF, WHAT_IF_TITLE, in_one_line, layer_rows, what_if_rows
from clika_ref.quantization.smoothing import (
    FEWEST,
    FREE_GAIN,
    GAIN,
    QuantizedReading,
    Wishes,
    smooth,
    smoothing_factors,
)
from clika_ref.quantization.spoiled_weights import refuse_spoiled_weights
from clika_ref.quantization.stages import Stages
from clika_ref.quantization.weight_scaling import FewBitReading
from clika_ref.quantization.weights_only import Ways
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings import Switch
from clika_ref.signature import Signature
from clika_ref.wanted import Wanted, few_bits

EMPTY = "calibration_inputs hold no element; give at least one batch, and no generator that was read before"


def to_calibrate(graph: Graph, wanted: Wanted, registry: Registry, found: Calibration | None = None) -> Calibration:
    """Return a calibration of a graph as it is going to be written, which begins with what another one has found.

    Raises:
        ModelError: weights are NaN or infinite.
    """
    refuse_spoiled_weights(graph)
    clone, model = graph.clone(), fingerprint(graph)
    aside = tuple(set_aside(clone, is_quantized=True))
    lower(clone, registry, wanted.target, for_any_weights=bool(aside))
    if found is None:
        calibration = Calibration(clone, RangeTable(smoothed_for=wanted.smoothed_for, model=model), model=model)
    else:
        calibration = found.of(clone, model)
    calibration.aside = aside
    _smooth(calibration, registry)
    return calibration


def _smooth(calibration: Calibration, registry: Registry) -> None:
    """Divide what the table says is divided, and compute all weights: otherwise they are whenever they are read.

    None of them has a gradient: equal ones are one by now, and a mean that is a bias as well must not get one. Adapters
    come beside layers once it is known what is divided, as they take a part in that.
    """
    smooth(calibration.graph, calibration.table.smoothing or {}, registry.operators)
    if calibration.table.smoothing is not None:
        restore_beside(calibration.graph, calibration.aside, registry.operators)
    for value in calibration.graph.constants.values():
        elements, formula = value.data, value.formula
        if elements is not None:
            elements = elements.detach()
            value.data = replace(formula, known=elements) if isinstance(formula, Formula) else elements


def calibrate(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    wanted: Wanted,
    registry: Registry,
    log: CompilationLog,
    *,
    total: int | None,
) -> None:
    """Run a graph on batches; those that the range table counts already are only looked at to be kept.

    The first one shows which channels to smooth before anything is counted.

    Raises:
        ModelError: there is none, or one holds NaN or infinities.
    """
    seen, started = calibration.table.batches, time.perf_counter()
    with log.stage("Calibrating") as stage:
        for number, inputs in enumerate(batches, 1):
            if calibration.table.smoothing is None:
                calibration.refuse_infinite(inputs)
                calibration.table.smoothing = _factors(calibration.graph, wanted, inputs)
                _smooth(calibration, registry)
            if number > seen:
                calibration.add(inputs)
                stage.progress(number, total, (number - seen) / (time.perf_counter() - started))
            elif number > calibration.sizes.total():
                calibration.keep(inputs)
        if not calibration.reservoir.batches:
            raise ModelError(EMPTY)
        known = f", {seen:,} of them from before" if seen else ""
        stage.done(f"{calibration.table.batches:,} batches{known}, {len(calibration.table.values):,} values")


def _factors(graph: Graph, wanted: Wanted, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what to smooth, given a batch; where only weights are quantized, what costs no node of its own."""
    scheme, settings = wanted.scheme, wanted.settings
    smoothing, equalization = wanted.options.smoothing, wanted.options.equalization
    if settings.prefer_weights_only_quantization and scheme.weights_only is not None:
        bits, blocks = few_bits(settings)
        try_on = partial(FewBitReading, bits=bits, blocks=blocks, ways=Ways.of(wanted.options))
        wishes = Wishes(None, _share(smoothing, FREE_GAIN), None, 0)  # each is judged by data that it is not fitted to
        return smoothing_factors(graph, scheme.weights_only.layers, inputs, try_on, wishes)
    shares = _share(smoothing, GAIN), _share(smoothing, FREE_GAIN), _share(equalization, FREE_GAIN)
    wishes = Wishes(*shares, 0 if "on" in (smoothing, equalization) else FEWEST)
    return smoothing_factors(graph, scheme.layers, inputs, partial(QuantizedReading, scheme=scheme), wishes)


def _share(switch: Switch, share: float) -> float | None:
    """Return the share of an error that a factor must leave at most; None where it is switched off."""
    return None if switch == "off" else 1.0 if switch == "on" else share


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
        _smooth(calibration, registry)
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


def decide(stages: Stages, graph: Graph, wanted: Wanted, registry: Registry, log: CompilationLog) -> Quantization:
    """Decide what of a calibrated graph becomes integers, and write into the log what, and why not.

    Args:
        stages: of the graph.
        graph: of the module, as it is stored.
        wanted: what the user chose.
        registry: the plugins.
        log: what it tells.
    """
    with log.stage("Quantizing") as stage:
        values = sorted(stages.calibration.table.values)
        for number, name in enumerate(values, 1):
            log.detail(f"Processing Quantization statistics {number}/{len(values)}: '{name}'")
        found = stages.decided()
        if wanted.options.optimize_for == "latency" and not found.plan.is_empty:
            found = _fast(found, stages, graph, wanted, registry)
        _tell(found, log)
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


def _tell(found: Quantization, log: CompilationLog) -> None:
    quantized = [layer.name for layer in found.layers if not layer.reason]
    for layer in found.layers:
        if layer.reason:
            log.detail(f"Automatic Quantization: Skipping Quantization for node: '{layer.name}' ({layer.reason})")
    for number, name in enumerate(quantized, 1):
        log.detail(f"Quantization: Processed {number}/{len(quantized)} - '{name}'")
    log.detail("Quantization: done")
    log.table("Summary", LAYERS, layer_rows(found))
    log.table(WHAT_IF_TITLE, WHAT_IF, what_if_rows(found))
    if found.spared:
        log.detail(f"In no row of these: {', '.join(found.spared)}; sparing='off' quantizes them as well")


OTHER = (
    "The data begins with another batch than the pass that was interrupted after {:,}: ranges are found anew; to go on "
    "with that pass, give the same data in the same order"
)

SHUFFLED = (
    "The data begins with another batch than the ranges in {0} do: these stay, and as many batches, {1:,}, are not "
    "run; where it is not the same data in another order, remove the file, or name another one in ranges_file"
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

    Raises:
        ModelError: a key of the settings of layers matches nothing, or a width is asked for that the target lacks.
        TargetError: layers are to be timed, and the target cannot run them.
    """

    def found() -> Stages:
        chosen = choices(calibration.graph, wanted.settings, wanted.layers, model)
        try:
            return Stages(calibration, wanted.scheme, chosen, wanted.settings, registry.operators, wanted.options)
        except ModelError as error:
            msg = f"for {wanted.target.name}, {error}"
            raise ModelError(msg) from error

    found()  # what cannot be had is refused before data is read
    if wanted.options.optimize_for == "latency":
        refuse(calibration.graph, wanted.target)  # what does not run takes no time that could be told
    if wanted.idle:
        log.warning(f"{', '.join(wanted.idle)} changes nothing where weights alone are quantized")
    anew = partial(to_calibrate, model, wanted, registry)
    with kept_in(ranges_file, calibration, registry, log, anew):
        known = _known_again(calibration, batches, log, anew, ranges_file) if are_given else batches
        calibrate(calibration, known, wanted, registry, log, total=total)
    stages = found()  # smoothing may have added nodes
    if wanted.options.optimize_for == "latency" and not wanted.settings.prefer_weights_only_quantization:
        with log.stage("Timing") as stage:
            timer = LayerTimer(wanted.target, wanted.scheme, registry.operators)
            stages.slow = timer.slower(calibration.graph, calibration.reservoir.batches[0])
            stage.done(f"{len(stages.slow):,} layers are slower in integers, and stay float")
    return stages


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
