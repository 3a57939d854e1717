"""Pruning of a `ClikaModule`: mask weights with zeros, or remove channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compress.calibration_pass import NO_BATCHES_ERROR
from clika_ref.compress.graph_quantization import iter_graph_inputs
from clika_ref.core.errors import ModelError
from clika_ref.core.registry import load_registry
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.merging import gather_batches
from clika_ref.distributed.ranks import open_ranks
from clika_ref.lora.adapters import adapters_of
from clika_ref.module.quantized_module import NO_CALIBRATION_DATA, QuantizedModule
from clika_ref.pruning.batches import take_batches
from clika_ref.pruning.report import PruningReport
from clika_ref.pruning.stages import PruningRequest, prune_graph
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings

PRUNING_ON_TRACING_INPUTS = (
    "What pruning would change is weighed on an input that the module was traced with, whose values need not be like "
    "those of the data; give calibration_inputs"
)

PRUNING_WITH_ADAPTERS = (
    "the module has adapters beside its layers, whose sides would no longer fit: prune first, and attach adapters "
    "then, or merge these before, with clika_merge_lora()"
)

PRUNING_AFTER_QUANTIZATION = (
    "the module is quantized, with scales of the weights as they are: prune first, and quantize then, with "
    "clika_initialize_algorithms()"
)


class PrunedModule(QuantizedModule):
    """A module around a graph that can be pruned."""

    def clika_prune(
        self,
        pruning_settings: PruningSettings | None = None,
        *,
        layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = None,
        calibration_inputs: Iterable[Any] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> PruningReport:
        """Prune a compiled module; return the removed parts, which print as a table.

        The first few dozen samples of the data are used to estimate the error of the outputs, so pass them in no
        particular order. Prune first, then fine-tune, and quantize last; to combine both kinds of pruning, remove
        channels before masking weights. Pruning replaces parameters, so create a new optimizer afterwards.

        Args:
            pruning_settings: as for `clika_compile`; by default ``PruningSettings()``.
            layer_pruning_settings: overrides for single layers, as for `clika_compile`.
            calibration_inputs: the data, as for `clika_compile`; by default the data that the module holds.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: the module is quantized already or has adapters, there is no data, or it does not fit; or the
                settings cannot be satisfied.
            PassError: a node returns other types than expected after removal, which is a bug.
        """
        arguments = locals()  # only the arguments at this point
        together = open_ranks(distributed_training_settings or self._clika_distributed)
        with together as ranks, self._open_log(ranks) as log, outside_autocast(), torch.inference_mode(mode=False):
            check_types(arguments)
            if self._clika_quantized is not None:
                raise ModelError(PRUNING_AFTER_QUANTIZATION)
            if adapters_of(self.graph):
                raise ModelError(PRUNING_WITH_ADAPTERS)
            given = calibration_inputs
            data = None if given is None else LazyDataset(given, data_transform_fn, forward_fn)
            wanted = PruningRequest(pruning_settings or PruningSettings(), layer_pruning_settings or {})
            registry, graph = self._clika_registry or load_registry(), self.graph.clone()
            alike = {"pruning_settings": wanted.settings, "layer_pruning_settings": {**wanted.layers}}
            check_same_settings(alike, ranks)
            own, are_dealt = self._sensitivity_batches(data, log)
            batches = take_batches(gather_batches(ranks, own, are_dealt=are_dealt))
            if not batches:
                raise ModelError(NO_BATCHES_ERROR)
            found = prune_graph(graph, wanted, batches, registry.operators, log)
            if ranks.is_distributed:
                check_same_model(fingerprint(graph), ranks)
            self._keep_log(log)
        self._replace_graph(graph)
        return found

    def _sensitivity_batches(
        self, data: LazyDataset | None, log: CompilationLog
    ) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """Return batches of data, given or held by the module, and whether they differ between ranks.

        Raises:
            ModelError: there is no data.
        """
        if data is None and self._clika_calibration is not None:
            return take_batches(
                self._clika_calibration.reservoir.batches
            ), False  # the reservoir is the same on all ranks
        if data is None and self._clika_unread is not None and self._clika_unread.is_rereadable:
            data = self._clika_unread
        if data is not None:
            calls = data.start().calls(make_callable(self))
            return take_batches(iter_graph_inputs(self.graph, self._clika_signature, calls, log)), True
        if not self._clika_examples:
            raise ModelError(NO_CALIBRATION_DATA)
        if not self._clika_examples_are_data:
            log.warning(PRUNING_ON_TRACING_INPUTS)
        return take_batches(self._clika_examples), self._clika_examples_are_data
