"""Prune a compiled module: mask weights with zeros, or remove channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.state import CompiledModule, bind_graph, replace_graph
from clika_ref.compress.calibrate import NO_CALIBRATION_DATA, open_log
from clika_ref.compress.calibration_pass import NO_BATCHES_ERROR
from clika_ref.compress.graph_quantization import iter_graph_inputs
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.merging import gather_batches
from clika_ref.distributed.ranks import open_ranks
from clika_ref.lora.adapters import adapters_of
from clika_ref.pruning.batches import MIN_PRUNING_SAMPLES
from clika_ref.pruning.report import PruningReport
from clika_ref.pruning.stages import PruningRequest, prune_graph
from clika_ref.quantization.calibration.calibrator import take_batches
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings

PRUNING_ON_TRACING_INPUTS = (
    "Pruning uses a tracing input to estimate its effect, which may differ from real data. Pass calibration_inputs."
)

PRUNING_WITH_ADAPTERS = (
    "cannot prune: the module has adapters, whose matrices would no longer fit. Prune before attaching adapters, or "
    "merge them first with clika_merge_lora()"
)

PRUNING_AFTER_QUANTIZATION = (
    "cannot prune: the module is quantized, with the scales of its current weights. Prune first, then quantize with "
    "clika_initialize_algorithms()"
)


@dataclass(frozen=True)
class PruningArguments:
    """Arguments of `ClikaModule.clika_prune`, under their names."""

    pruning_settings: PruningSettings | None = None
    layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = None
    calibration_inputs: Iterable[Any] | None = None
    data_transform_fn: Callable[[Any], Any] | None = None
    forward_fn: ForwardFn | None = None
    distributed_training_settings: DistributedTrainingSettings | None = None


def prune(module: CompiledModule, given: PruningArguments) -> PruningReport:
    """Prune a module; return the removed parts."""
    state = module.clika_state
    together = open_ranks(given.distributed_training_settings or state.distributed)
    with together as ranks, open_log(state, ranks) as log, outside_autocast(), torch.inference_mode(mode=False):
        check_types(vars(given))
        graph = bind_graph(module)
        if state.quantized is not None:
            raise ModelError(PRUNING_AFTER_QUANTIZATION)
        if adapters_of(graph):
            raise ModelError(PRUNING_WITH_ADAPTERS)
        inputs = given.calibration_inputs
        data = None if inputs is None else LazyDataset(inputs, given.data_transform_fn, given.forward_fn)
        request = PruningRequest(given.pruning_settings or PruningSettings(), given.layer_pruning_settings or {})
        settings = {"pruning_settings": request.settings, "layer_pruning_settings": {**request.layers}}
        check_same_settings(settings, ranks)
        own, is_per_rank = _sensitivity_batches(module, graph, data, log)
        few = take_batches(own, MIN_PRUNING_SAMPLES)
        batches = take_batches(gather_batches(ranks, few, is_per_rank=is_per_rank), MIN_PRUNING_SAMPLES)
        if not batches:
            raise ModelError(NO_BATCHES_ERROR)
        found = prune_graph(graph, request, batches, state.registry.operators, log)
        if ranks.is_distributed:
            check_same_model(fingerprint(graph), ranks)
        state.record_log(log)
    replace_graph(module, graph)
    return found


def _sensitivity_batches(
    module: CompiledModule, graph: Graph, data: LazyDataset | None, log: CompilationLog
) -> tuple[Iterable[Sequence[torch.Tensor]], bool]:
    """Return batches of data, given or held by the module, and whether they differ between ranks.

    Raises:
        ModelError: there is no data.
    """
    state = module.clika_state
    if data is None and state.calibration is not None:
        return state.calibration.reservoir.batches, False  # the reservoir is the same on all ranks
    if data is None and state.unread is not None and state.unread.is_rereadable:
        data = state.unread
    if data is not None:
        calls = data.start().calls(make_callable(module))
        return iter_graph_inputs(graph, state.signature, calls, log), True
    if not state.examples:
        raise ModelError(NO_CALIBRATION_DATA)
    if not state.examples_are_data:
        log.warning(PRUNING_ON_TRACING_INPUTS)
    return state.examples, state.examples_are_data
