"""The calibration pass, in one process or several: search for SmoothQuant factors, then collect statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from clika_ref.compiled.lowering import lower
from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.distributed.merging import merge_calibrations
from clika_ref.distributed.ranks import Message, Ranks
from clika_ref.lora.lowering import detach_adapters, reattach_adapters
from clika_ref.quantization.algorithms.awq import LowBitWeightEvaluator
from clika_ref.quantization.algorithms.smooth_quant import (
    MAX_ERROR_SHARE_ABSORBED,
    MAX_ERROR_SHARE_WITH_NODE,
    MIN_ELEMENTS_PER_CHANNEL,
    QuantizedInputEvaluator,
    SmoothingOptions,
    apply_smoothing,
    search_smoothing_factors,
)
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.request import QuantizationRequest, smallest_width_and_blocks
from clika_ref.quantization.weight_checks import reject_nonfinite_weights
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.compile_options import Switch

NO_BATCHES_ERROR = (
    "cannot calibrate: calibration_inputs are empty. Give at least one batch, and no generator that was read before."
)

UNEVEN_RANKS_WARNING = (
    "The ranks calibrated on different numbers of batches: {}. Each batch counts once, but some ranks wait. "
    "Split the data evenly."
)


def prepare_calibration(
    graph: Graph, request: QuantizationRequest, registry: Registry, found: Calibration | None = None
) -> Calibration:
    """Return a calibration of the lowered form of a graph.

    Args:
        graph: in float; it is not changed.
        request: the target and the settings.
        registry: the operators and passes.
        found: another calibration with ranges to start with.

    Raises:
        ModelError: weights are NaN or infinite.
    """
    reject_nonfinite_weights(graph)
    clone, model = graph.clone(), fingerprint(graph)
    aside = tuple(detach_adapters(clone, is_quantized=True))
    lower(clone, registry, request.target, for_any_weights=bool(aside))
    if found is None:
        calibration = Calibration(
            clone, RangeTable(smoothing_purpose=request.smoothing_purpose, model=model), model=model
        )
    else:
        calibration = found.of(clone, model)
    calibration.detached_adapters = aside
    apply_table_smoothing(calibration, registry)
    return calibration


def apply_table_smoothing(calibration: Calibration, registry: Registry) -> None:
    """Apply the SmoothQuant factors of the table, and compute all weights once instead of at each read.

    Weights get no gradients: equal ones are merged by now, and a mean that is also a bias must not get one. Adapters
    are added again once the factors are known, since their matrices are multiplied by them.
    """
    apply_smoothing(calibration.graph, calibration.table.smoothing or {}, registry.operators)
    if calibration.table.smoothing is not None:
        reattach_adapters(calibration.graph, calibration.detached_adapters, registry.operators)
    for value in calibration.graph.constants.values():
        elements, formula = value.data, value.deferred_data
        if elements is not None:
            elements = elements.detach()
            if calibration.detached_adapters and isinstance(formula, DeferredConstant):  # keeps its sources in memory
                value.data = replace(formula, known=elements)
            else:
                value.data = elements


def run_calibration(
    calibration: Calibration,
    batches: Iterable[Sequence[torch.Tensor]],
    request: QuantizationRequest,
    registry: Registry,
    log: CompilationLog,
    *,
    total: int | None,
    ranks: Ranks,
) -> None:
    """Run a graph on batches; those that the range table counts already are only offered to the reservoir.

    The first batch of the first rank determines the SmoothQuant factors before anything is counted.

    Raises:
        ModelError: there is no batch, or one contains NaN or infinities.
    """
    seen, started = calibration.table.batches, time.perf_counter()
    with log.stage("Calibrating") as stage:
        later = iter(batches)
        first = [*itertools.islice(later, 1)]
        if calibration.table.smoothing is None:
            calibration.table.smoothing = _decide_smoothing(calibration, first, request, ranks)
            apply_table_smoothing(calibration, registry)
        for number, inputs in enumerate(itertools.chain(first, later), 1):
            if number > seen:
                calibration.add(inputs)
                stage.progress(number, total, (number - seen) / (time.perf_counter() - started))
            elif number > calibration.sizes.total():
                calibration.keep(inputs)
        counts = merge_calibrations(calibration, ranks)
        if not calibration.reservoir.batches:
            raise ModelError(NO_BATCHES_ERROR)
        known = f", {seen:,} of them from an earlier pass" if seen else ""
        of_ranks = f" of {ranks.count} ranks" if ranks.is_distributed else ""
        stage.done(
            f"{format_count(calibration.table.batches, 'batch')}{of_ranks}{known}, "
            f"{format_count(len(calibration.table.values), 'activation')}"
        )
    if max(counts) > min(counts) + 1:
        log.warning(UNEVEN_RANKS_WARNING.format(", ".join(map(str, counts))))


def _decide_smoothing(
    calibration: Calibration, first: Sequence[Sequence[torch.Tensor]], request: QuantizationRequest, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Return the SmoothQuant factors, from the first batch of the first rank."""

    def search_factors() -> Message:
        if not first:
            raise ModelError(NO_BATCHES_ERROR)
        calibration.reject_infinite(first[0])
        factors = _search_factors(calibration.graph, request, first[0])
        return {"values": [*factors]}, factors

    document, factors = ranks.broadcast_message(search_factors)
    device = calibration.devices[0] if calibration.graph.inputs else torch.device("cpu")
    return {name: factors[name].to(device) for name in document["values"]}


def _search_factors(
    graph: Graph, request: QuantizationRequest, inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the SmoothQuant factors from a batch; if only weights are quantized, those that need no separate node."""
    scheme, settings = request.scheme, request.settings
    smooth_quant, equalization = request.options.smooth_quant, request.options.equalization
    if settings.prefer_weights_only_quantization and scheme.weights_only is not None:
        bits, blocks = smallest_width_and_blocks(settings)
        try_on = partial(LowBitWeightEvaluator, bits=bits, blocks=blocks, options=request.options)
        smoothing_options = SmoothingOptions(
            None, _error_share(smooth_quant, MAX_ERROR_SHARE_ABSORBED), None, 0
        )  # each is evaluated on held-out data
        return search_smoothing_factors(graph, scheme.weights_only.layers, inputs, try_on, smoothing_options)
    shares = (
        _error_share(smooth_quant, MAX_ERROR_SHARE_WITH_NODE),
        _error_share(smooth_quant, MAX_ERROR_SHARE_ABSORBED),
        _error_share(equalization, MAX_ERROR_SHARE_ABSORBED),
    )
    smoothing_options = SmoothingOptions(
        *shares, 0 if "on" in (smooth_quant, equalization) else MIN_ELEMENTS_PER_CHANNEL
    )
    return search_smoothing_factors(
        graph, scheme.layers, inputs, partial(QuantizedInputEvaluator, scheme=scheme), smoothing_options
    )


def _error_share(switch: Switch, share: float) -> float | None:
    """Return the largest share of the error that a factor may leave; None if it is switched off."""
    return None if switch == "off" else 1.0 if switch == "on" else share
