"""Execution of a quantized module in training mode: fake quantization of its parameters, with gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clika_ref.compiled.lowering import lower_for
from clika_ref.compiled.quantization_state import QuantizationState, target_of
from clika_ref.compiled.weights import Weights, device_of_constants, weight_paths
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.lora.adapters import enable_dropout
from clika_ref.quantization.qat.learned_scales import apply_learned_scales, has_valid_scales, scales_by_log_name
from clika_ref.quantization.qat.training_graph import make_trainable
from clika_ref.settings.compile_options import BatchNormMode


class TrainingExecutor:
    """Runs the training graph of a quantized module with its current parameters."""

    def __init__(
        self,
        graph: Graph,
        quantized: QuantizationState,
        logs: Mapping[str, Tensor],
        registry: Registry,
        norms: BatchNormMode,
    ) -> None:
        """Build the training graph.

        Args:
            graph: that of the module, bound to its current weights.
            quantized: the quantization of the module.
            logs: the parameters of learned log scales.
            registry: the plugins.
            norms: whether batch norms are live.

        Raises:
            ModelError: a pass does not declare its change of a parameter.
            TargetError: no plugin provides the target.
        """
        self.device = device_of_constants(graph)
        target, plan, clone = target_of(quantized, registry), quantized.plan.to_device(self.device), graph.clone()
        with torch.no_grad():
            lower_for(plan, clone, registry, target, for_any_weights=True)
            enable_dropout(clone)
            multipliers = make_trainable(clone, graph, plan, logs, has_live_norms=norms == "live")
        self.quantized = replace(quantized, plan=replace(quantized.plan, norms=multipliers))
        """With the multipliers that live norms had when scales were chosen."""
        bound = graph.constants.keys() | logs.keys()
        paths = list(zip(weight_paths(clone), clone.constants.items(), strict=True))
        self._weight_paths = [path for path, (name, _) in paths if name in bound]
        self._own = {path[0]: value.data for path, (name, value) in paths if name not in bound}
        self._logs = {name: path[0] for path, (name, _) in paths if name in logs}
        scales = [scales_by_log_name(plan)[name].reshape(-1) for name in self._logs]
        self._planned = torch.cat([scale.to(self.device) for scale in scales]) if scales else None
        self._run = compile_with_fx(clone)

    def __call__(self, module: nn.Module, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the outputs of the graph with the weights of a module.

        Raises:
            ModelError: scales became invalid in the last step; the message names all of them. A compiled module is not
                checked, since that would break its graph.
        """
        holder: Any = Weights(module, self._weight_paths)
        if not torch.compiler.is_compiling() and self.device.type != "meta":
            self._reject_invalid_scales(holder)
        for name, constant in self._own.items():
            setattr(holder, name, constant)
        return self._run(holder, *inputs)

    def _reject_invalid_scales(self, holder: Any) -> None:
        logs = {name: getattr(holder, constant) for name, constant in self._logs.items()}
        if self._planned is not None and not has_valid_scales(self._planned, [*logs.values()]):
            apply_learned_scales(self.quantized.plan, logs)
