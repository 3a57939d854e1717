"""The calibration pass, in one process or several: search for smoothing factors, then collect statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.distributed.merging import merge
from clika_ref.distributed.ranks import Message, Ranks
from clika_ref.exporting.export import lower
from clika_ref.formulas import Formula
from clika_ref.lora.lowering import restore_beside, set_aside
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.fingerprint import fingerprint
from clika_ref.quantization.ranges import RangeTable
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
from clika_ref.quantization.weight_scaling import FewBitReading
from clika_ref.quantization.weights_only import Ways
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings import Switch
from clika_ref.wanted import Wanted, few_bits

EMPTY = "calibration_inputs hold no element; give at least one batch, and no generator that was read before"

UNEVEN = (
    "The ranks gave {} batches. Each of them counts once, and the plan is that of one process that takes them in "
    "turns; deal the data evenly, so that none waits for another"
)


def to_calibrate(graph: Graph, wanted: Wanted, registry: Registry, found: Calibration | None = None) -> Calibration:
    """Return a calibration of the lowered form of a graph.

    Args:
        graph: in float; it is not changed.
        wanted: the target and the settings.
        registry: the operators and passes.
        found: another calibration with ranges to start with.

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
    smooth_as_found(calibration, registry)
    return calibration


def smooth_as_found(calibration: Calibration, registry: Registry) -> None:
    """Apply the smoothing factors of the table, and compute all weights once instead of at each read.

    Weights get no gradients: equal ones are merged by now, and a mean that is also a bias must not get one. Adapters
    are put back once the factors are known, since they absorb a part of them.
    """
    smooth(calibration.graph, calibration.table.smoothing or {}, registry.operators)
    if calibration.table.smoothing is not None:
        restore_beside(calibration.graph, calibration.aside, registry.operators)
    for value in calibration.graph.constants.values():
        elements, formula = value.data, value.formula
        if elements is not None:
            elements = elements.detach()
            if calibration.aside and isinstance(formula, Formula):  # keeps its sources in memory
                value.data = replace(formula, known=elements)
            else:
                value.data = elements


def calibrate(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    wanted: Wanted,
    registry: Registry,
    log: CompilationLog,
    *,
    total: int | None,
    ranks: Ranks,
) -> None:
    """Run a graph on batches; those that the range table counts already are only offered to the reservoir.

    The first batch of the first rank determines the channels to smooth before anything is counted.

    Raises:
        ModelError: there is no batch, or one contains NaN or infinities.
    """
    seen, started = calibration.table.batches, time.perf_counter()
    with log.stage("Calibrating") as stage:
        later = iter(batches)
        first = [*itertools.islice(later, 1)]
        if calibration.table.smoothing is None:
            calibration.table.smoothing = _smoothing(calibration, first, wanted, ranks)
            smooth_as_found(calibration, registry)
        for number, inputs in enumerate(itertools.chain(first, later), 1):
            if number > seen:
                calibration.add(inputs)
                stage.progress(number, total, (number - seen) / (time.perf_counter() - started))
            elif number > calibration.sizes.total():
                calibration.keep(inputs)
        counts = merge(calibration, ranks)
        if not calibration.reservoir.batches:
            raise ModelError(EMPTY)
        known = f", {seen:,} of them from before" if seen else ""
        of_ranks = f" of {ranks.count} ranks" if ranks.are_several else ""
        stage.done(f"{calibration.table.batches:,} batches{of_ranks}{known}, {len(calibration.table.values):,} values")
    if max(counts) > min(counts) + 1:
        log.warning(UNEVEN.format(", ".join(map(str, counts))))


def _smoothing(
    calibration: Calibration, first: Sequence[Sequence[torch.Tensor]], wanted: Wanted, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Return the smoothing factors, from the first batch of the first rank."""

    def found() -> Message:
        if not first:
            raise ModelError(EMPTY)
        calibration.refuse_infinite(first[0])
        factors = _factors(calibration.graph, wanted, first[0])
        return {"values": [*factors]}, factors

    document, factors = ranks.told_by_first(found)
    device = calibration.devices[0] if calibration.graph.inputs else torch.device("cpu")
    return {name: factors[name].to(device) for name in document["values"]}


def _factors(graph: Graph, wanted: Wanted, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the smoothing factors from a batch; if only weights are quantized, those that need no separate node."""
    scheme, settings = wanted.scheme, wanted.settings
    smoothing, equalization = wanted.options.smoothing, wanted.options.equalization
    if settings.prefer_weights_only_quantization and scheme.weights_only is not None:
        bits, blocks = few_bits(settings)
        try_on = partial(FewBitReading, bits=bits, blocks=blocks, ways=Ways.of(wanted.options))
        wishes = Wishes(None, _share(smoothing, FREE_GAIN), None, 0)  # each is evaluated on held-out data
        return smoothing_factors(graph, scheme.weights_only.layers, inputs, try_on, wishes)
    shares = _share(smoothing, GAIN), _share(smoothing, FREE_GAIN), _share(equalization, FREE_GAIN)
    wishes = Wishes(*shares, 0 if "on" in (smoothing, equalization) else FEWEST)
    return smoothing_factors(graph, scheme.layers, inputs, partial(QuantizedReading, scheme=scheme), wishes)


def _share(switch: Switch, share: float) -> float | None:
    """Return the largest share of the error that a factor may leave; None if it is switched off."""
    return None if switch == "off" else 1.0 if switch == "on" else share
