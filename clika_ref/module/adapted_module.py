"""Low-rank adapters of a `ClikaModule`: attach them, save them on their own, and merge them into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from clika_ref.compiled.lowering import lower_for
from clika_ref.compiled.quantization_state import QuantizationState, target_of
from clika_ref.compiled.weights import set_parameters
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.ranks import broadcast_from_rank0, open_ranks
from clika_ref.lora.adapter_scales import add_adapter_scales
from clika_ref.lora.adapter_state import adapter_config, adapter_state, load_adapter_state
from clika_ref.lora.adapters import ADAPTER_SCOPE, adapters_of, freeze_base
from clika_ref.lora.attaching import attach_adapters, random_matrices
from clika_ref.lora.merging import merge_adapters
from clika_ref.lora.report import AdapterReport
from clika_ref.module.pruned_module import PrunedModule
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import LIVE_NORMS_WITH_ADAPTERS
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.lora import LoraSettings

NO_ADAPTERS = (
    "the module has no adapters; attach them with clika_attach_lora(LoraSettings(...)), or compile with "
    "ClikaCompileOptions(global_lora_settings=LoraSettings(...))"
)


class AdaptedModule(PrunedModule):
    """A module around a graph that can have low-rank adapters."""

    def clika_attach_lora(
        self,
        lora_settings: LoraSettings | None = None,
        *,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> AdapterReport:
        """Attach adapters to a compiled module; return the adapters, which print as a table.

        From then on only the adapters are trained: all other parameters, including learned quantization scales, no
        longer require gradients. The outputs do not change at first. A quantized module stays quantized, with the same
        quantized weights and learned scales; its calibration ranges are dropped. Create a new optimizer from the
        parameters that require gradients.

        Args:
            lora_settings: the layers to adapt, and the rank; by default all layers.
            distributed_training_settings: if several processes work together, all of them call this and get the
                adapters of the first rank; by default as the module was compiled.

        Raises:
            ModelError: a name in the settings matches no layer, the module has adapters already, or its batch norms are
                live; or another process has another module.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        settings = lora_settings or LoraSettings()
        together = open_ranks(distributed_training_settings or self._clika_distributed)
        with together as ranks, self._open_log(ranks) as log:
            check_types({"lora_settings": lora_settings})
            if self._clika_options.batch_norm == "live":
                raise ModelError(LIVE_NORMS_WITH_ADAPTERS)
            registry, graph = self._clika_registry or load_registry(), self.graph.clone()
            check_same_settings({"lora_settings": settings}, ranks)
            found = attach_adapters(graph, settings, registry.operators, log)
            broadcast_from_rank0(ranks, random_matrices(graph))
            if ranks.is_distributed:
                check_same_model(fingerprint(graph), ranks)
            self._keep_log(log)
        own, wanted = self._learned_quantization, self._clika_wanted
        quantized = own and self._add_adapter_scales(own, graph)
        self._replace_graph(graph)
        if quantized is not None:
            self._set_quantization(quantized, None, wanted)
        freeze_base(self)
        return found

    def _add_adapter_scales(self, own: QuantizationState, graph: Graph) -> QuantizationState:
        """Return the quantization state with scales for the outputs of the adapters."""
        registry = self._clika_registry or load_registry()
        clone = graph.clone()
        with torch.no_grad():
            lower_for(own.plan, clone, registry, target_of(own, registry))
        return replace(own, plan=add_adapter_scales(own.plan, clone), model=fingerprint(graph))

    def _set_quantization(
        self,
        quantized: QuantizationState | None,
        calibration: Calibration | None,
        wanted: QuantizationRequest | None = None,
    ) -> None:
        """Switch to a quantization state; with adapters, the scales stay as planned and are frozen like the weights."""
        super()._set_quantization(quantized, calibration, wanted)
        if adapters_of(self._clika_graph):
            for log in self._log_scales.values():
                log.requires_grad_(False)

    def clika_lora_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the adapters, two matrices for each layer, under the names of the ``peft`` package, for safetensors.

        Raises:
            ModelError: the module has no adapters.
        """
        return adapter_state(self._require_adapters())

    def clika_lora_config(self) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json`` in the format of the ``peft`` package, ready for ``json``.

        Raises:
            ModelError: the module has no adapters.
        """
        return adapter_config(self._require_adapters())

    def clika_load_lora_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load adapters, two matrices for each layer, from `clika_lora_state_dict` or from ``peft``.

        Raises:
            ModelError: the module has no adapters, or the adapters do not match; all mismatches are listed, and nothing
                is loaded.
        """
        load_adapter_state(self._require_adapters(), state_dict)

    def clika_merge_lora(self) -> None:
        """Merge the adapters into the weights and remove them; frozen parameters stay frozen.

        Raises:
            ModelError: the module has no adapters, or one belongs to a layer with a quantized, masked or tied weight.
        """
        self._require_adapters()
        own, wanted, graph = self._learned_quantization, self._clika_wanted, self.graph.clone()
        merge_adapters(graph, is_quantized=own is not None)
        self._replace_graph(graph)
        set_parameters(self, (ADAPTER_SCOPE,), {})
        if own is not None:
            self._set_quantization(replace(own, model=fingerprint(self.graph)), None, wanted)

    def _require_adapters(self) -> Graph:
        """Return the graph, after checking that it has adapters.

        Raises:
            ModelError: it has none.
        """
        graph = self.graph
        if not adapters_of(graph):
            raise ModelError(NO_ADAPTERS)
        return graph
