"""Attach low-rank adapters to a compiled module, and merge them into its weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from clika_ref.compiled.lowering import lower_for
from clika_ref.compiled.quantization_state import QuantizationState, target_of
from clika_ref.compiled.state import (
    CompiledModule,
    bind_graph,
    learned_quantization,
    replace_graph,
    set_quantization,
)
from clika_ref.compiled.weights import set_parameters
from clika_ref.compress.calibrate import open_log
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.ranks import broadcast_from_rank0, open_ranks
from clika_ref.lora.adapters import ADAPTER_OPERATORS, ADAPTER_SCOPE, adapters_of, freeze_base, layer_of
from clika_ref.lora.attaching import attach_adapters, random_matrices
from clika_ref.lora.merging import merge_adapters
from clika_ref.lora.report import AdapterReport
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import LIVE_NORMS_WITH_ADAPTERS
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.lora import LoraSettings

NO_ADAPTERS = (
    "cannot use adapters: the module has none. Attach them with clika_attach_lora(LoraSettings(...)), or compile "
    "with ClikaCompileOptions(global_lora_settings=LoraSettings(...))."
)


def attach_lora(
    module: CompiledModule, lora_settings: LoraSettings | None, distributed: DistributedTrainingSettings | None
) -> AdapterReport:
    """Attach adapters to a module, and freeze all other parameters; return the adapters."""
    state, settings = module.clika_state, lora_settings or LoraSettings()
    with open_ranks(distributed or state.distributed) as ranks, open_log(state, ranks) as log:
        check_types({"lora_settings": lora_settings})
        if state.options.batch_norm == "live":
            raise ModelError(LIVE_NORMS_WITH_ADAPTERS)
        graph = bind_graph(module)
        check_same_settings({"lora_settings": settings}, ranks)
        found = attach_adapters(graph, settings, state.registry.operators, log)
        broadcast_from_rank0(ranks, random_matrices(graph))
        if ranks.is_distributed:
            check_same_model(fingerprint(graph), ranks)
        state.record_log(log)
    own, request = learned_quantization(module), state.request
    quantized = own and _add_adapter_scales(own, graph, state.registry)
    replace_graph(module, graph)
    if quantized is not None:
        set_quantization(module, quantized, None, request)
    freeze_base(module)
    return found


def _add_adapter_scales(own: QuantizationState, graph: Graph, registry: Registry) -> QuantizationState:
    """Return a quantization, made before adapters were attached, with scales for the outputs of the adapters.

    The output of an adapter gets the scale of its layer's output. The latter keeps a scale if the target needs one to
    run such a layer quantized. The quantized weights and the names of layers do not change.
    """
    plan, clone = own.plan, graph.clone()
    with torch.no_grad():
        lower_for(plan, clone, registry, target_of(own, registry))
    activations, scaled_as = dict(plan.activations), dict(plan.scale_sources)
    for node in [node for node in clone.nodes if node.op_type in ADAPTER_OPERATORS.values()]:
        layer, result = layer_of(node), node.name
        if layer.name not in activations:
            continue
        activations[result] = activations[layer.name]
        for value, source in plan.scale_sources.items():
            if source == layer.name:
                scaled_as[value] = result
        if layer.name in scaled_as:
            scaled_as[result] = scaled_as[layer.name]
        if layer.op_type not in plan.scheme.needs_quantized_output:
            del activations[layer.name]
            scaled_as.pop(layer.name, None)
    extended = replace(plan, activations=activations, scale_sources=scaled_as)
    return replace(own, plan=extended, model=fingerprint(graph))


def merge_lora(module: CompiledModule) -> None:
    """Merge the adapters of a module into its weights, and remove them."""
    graph, own, request = require_adapters(module), learned_quantization(module), module.clika_state.request
    merge_adapters(graph, is_quantized=own is not None)
    replace_graph(module, graph)
    set_parameters(module, (ADAPTER_SCOPE,), {})
    if own is not None:
        set_quantization(module, replace(own, model=fingerprint(bind_graph(module))), None, request)


def require_adapters(module: CompiledModule) -> Graph:
    """Return the graph of a module with adapters, bound to its weights.

    Raises:
        ModelError: it has none.
    """
    graph = bind_graph(module)
    if not adapters_of(graph):
        raise ModelError(NO_ADAPTERS)
    return graph
