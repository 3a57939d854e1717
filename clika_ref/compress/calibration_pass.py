"""The calibration pass, in one process or several: search SmoothQuant factors, apply them, and collect statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from clika_ref.compiled.lowering import lower
from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.errors import ModelError
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
    """Lower a clone of a graph, and return a calibration of it.

    Args:
        graph: in float; it is not changed.
        request: the target and the settings.
        registry: the operators and passes.
        found: an earlier calibration; the new one keeps its ranges and batches.

    Raises:
        ModelError: weights are NaN or infinite.
    """
    reject_nonfinite_weights(graph)
    clone, model = graph.clone(), fingerprint(graph)
    detached_adapters = tuple(detach_adapters(clone, is_quantized=True))
    lower(clone, registry, request.target, for_any_weights=bool(detached_adapters))
    if found is None:
        calibration = Calibration(
            clone, RangeTable(smoothing_purpose=request.smoothing_purpose, model=model), model=model
        )
    else:
        calibration = found.of(clone, model)
    calibration.detached_adapters = detached_adapters
    apply_table_smoothing(calibration, registry)
    return calibration


def apply_table_smoothing(calibration: Calibration, registry: Registry) -> None:
    """Apply the SmoothQuant factors of the range table to the graph, and compute each deferred constant once.

    Adapters are added again once the factors are known, since their matrices are multiplied by the factors. Constants
    are detached: lowering may have merged equal ones, such as a bias with a running mean that needs no gradient.
    """
    apply_smoothing(calibration.graph, calibration.table.smoothing or {}, registry.operators)
    if calibration.table.smoothing is not None:
        reattach_adapters(calibration.graph, calibration.detached_adapters, registry.operators)
    for value in calibration.graph.constants.values():
        elements, deferred = value.data, value.deferred_data
        if elements is not None:
            elements = elements.detach()
            # Adding adapters needs these deferred constants, which keep their sources in memory.
            if calibration.detached_adapters and isinstance(deferred, DeferredConstant):
                value.data = replace(deferred, known=elements)
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
    """Run the graph of a calibration on batches, and add their statistics to its range table.

    A resumed calibration does not run batches again that its table contains. It only keeps them, if they were not kept
    yet. The first batch of the first rank determines the SmoothQuant factors before statistics are collected.

    Args:
        calibration: changed in place; complete after each batch.
        batches: inputs of the graph, one tensor for each, from the first batch on.
        request: the target and the settings.
        registry: the operators and passes.
        log: the log to report to.
        total: the number of batches, for the progress bar; None if unknown.
        ranks: the processes that calibrate together, each on its own batches.

    Raises:
        ModelError: there is no batch, or one contains NaN or infinities.
    """
    counted, started = calibration.table.batches, time.perf_counter()
    with log.stage("Calibrating") as stage:
        rest = iter(batches)
        first = [*itertools.islice(rest, 1)]
        start_smoothing(calibration, first, request, registry, ranks)
        for number, inputs in enumerate(itertools.chain(first, rest), 1):
            if number > counted:
                calibration.add(inputs)
                stage.progress(number, total, (number - counted) / (time.perf_counter() - started))
            elif number > calibration.sizes.total():  # ranges from a file have no batches
                calibration.keep(inputs)
        counts = merge_calibrations(calibration, ranks)
        if not calibration.reservoir.batches:
            raise ModelError(NO_BATCHES_ERROR)
        earlier = f", {counted:,} of them from an earlier pass" if counted else ""
        of_ranks = f" of {ranks.count} ranks" if ranks.is_distributed else ""
        stage.done(
            f"{calibration.table.batches:,} batches{of_ranks}{earlier}, {len(calibration.table.values):,} activations"
        )
    if max(counts) > min(counts) + 1:  # a difference of one is an even split
        log.warning(UNEVEN_RANKS_WARNING.format(", ".join(map(str, counts))))


def start_smoothing(
    calibration: Calibration,
    first: Sequence[Sequence[torch.Tensor]],
    request: QuantizationRequest,
    registry: Registry,
    ranks: Ranks,
) -> None:
    """Search and apply the SmoothQuant factors of a calibration, unless it has them already.

    Args:
        calibration: changed in place.
        first: the first batch of this process, one tensor for each input of the graph; none if it has no data.
        request: the target and the settings.
        registry: the operators and passes.
        ranks: the processes that calibrate together.

    Raises:
        ModelError: the first process has no batch, or it is not finite.
    """
    if calibration.table.smoothing is None:
        calibration.table.smoothing = _decide_smoothing(calibration, first, request, ranks)
        apply_table_smoothing(calibration, registry)


def _decide_smoothing(
    calibration: Calibration, first: Sequence[Sequence[torch.Tensor]], request: QuantizationRequest, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Search the SmoothQuant factors on the first rank, with its first batch, and return them on all ranks."""

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
    """Search SmoothQuant factors with a batch.

    For weight-only quantization, factors are used only if no separate node must divide the activation.
    """
    scheme, settings = request.scheme, request.settings
    smooth_quant, equalization = request.options.smooth_quant, request.options.equalization
    if settings.prefer_weights_only_quantization and scheme.weights_only is not None:
        bits, blocks = smallest_width_and_blocks(settings)
        try_on = partial(LowBitWeightEvaluator, bits=bits, blocks=blocks, options=request.options)
        # Any number of elements is enough: each factor is evaluated on held-out data.
        smoothing_options = SmoothingOptions(None, _error_share(smooth_quant, MAX_ERROR_SHARE_ABSORBED), None, 0)
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
    """Return the error share that a factor may leave: ``share`` for "auto", 1 for "on", None for "off"."""
    return None if switch == "off" else 1.0 if switch == "on" else share
