"""Export a compiled module: its inputs and examples, its plan for the target, and the verified artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from clika_ref.capture.inputs import convert_arrays, pack_arguments
from clika_ref.capture.memory_limits import freeze_gc
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph, update_simulation
from clika_ref.compiled.weights import device_of_weights, weight_dtype_error
from clika_ref.compress.quantize import plan_for, warn_of_changed_weights
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import check_inputs
from clika_ref.core.ir import Graph
from clika_ref.export.configuration import current_configuration
from clika_ref.export.example_inputs import choose_example, make_dummy_inputs
from clika_ref.export.export import ExportRequest, artifact_path, export
from clika_ref.export.exposed_state import ExposedState, expose_state, warn_of_lost_state
from clika_ref.export.interface import resolve_names
from clika_ref.export.quantized_check import MIN_MARGIN_SAMPLES
from clika_ref.quantization.calibration.calibrator import take_batches
from clika_ref.quantization.graph_runs import compute_outputs, run_graph
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import BaseDeploymentSettings


@dataclass(frozen=True)
class ExportArguments:
    """Arguments of `ClikaModule.clika_export`, under their names."""

    file: Any
    example_inputs: Any = None
    input_names: list[str] | None = None
    output_names: list[str] | None = None
    dynamic_axes: Mapping[str, Any] | None = None
    deployment_settings: BaseDeploymentSettings | None = None


def export_module(
    module: CompiledModule,
    given: ExportArguments,
    log: CompilationLog | None = None,
    *,
    is_guarded: bool = False,
) -> Artifact:
    """Write the artifact of a module for a target, and return its facts.

    Args:
        module: the module.
        given: the arguments of the export.
        log: replaces a log of its own.
        is_guarded: whether the guards are checked before each call of the artifact, as by the runner of a piece.
    """
    check_types(vars(given))
    state, form = module.clika_state, current_configuration()
    deployment = state.choose_deployment(given.deployment_settings)
    path = artifact_path(given.file, deployment, state.registry)
    graph = bind_exportable_graph(module)
    if state.simulation is not None and not module.training:  # the simulation must match the artifact
        update_simulation(module)
    exposed = expose_state(graph) if state.options.state == "io" else ExposedState(graph, (), ())
    examples = list_examples(module, graph, given.example_inputs)
    graph, count = exposed.graph, len(graph.outputs)

    def select(outputs: Sequence[Any]) -> list[Any]:
        return [*form.select_outputs(outputs[:count]), *outputs[count:]]

    inputs = resolve_names("input_names", given.input_names, [value.name for value in graph.inputs])
    defaults = select([*state.signature.output_names(inputs), *exposed.output_names])
    plan = plan_for(module, graph, deployment)
    reference = _make_reference(state, graph, is_quantized=plan is not None and not plan.is_empty)
    request = ExportRequest(
        graph.clone(select(graph.outputs)),
        path,
        [[*example, *exposed.tensors] for example in examples],
        lambda inputs: select(reference(inputs)),
        inputs,
        resolve_names("output_names", given.output_names, defaults, taken=inputs),
        given.dynamic_axes,
        plan,
        state.options,
        state.sizes,
        form,
        is_guarded,
    )
    with log or CompilationLog.open(state.logs_dir) as own, outside_autocast(), freeze_gc():
        warn_of_changed_weights(module, graph, plan, own)
        warn_of_lost_state(graph, own)
        artifact = export(request, deployment, state.registry, own)
        state.record_log(own)
    return artifact


def _make_reference(
    state: CompiledState, graph: Graph, *, is_quantized: bool
) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Return a function that computes the results to compare an artifact with: eager's if kept, else the graph's.

    Args:
        state: the state of the module.
        graph: that of the module, bound to its current weights.
        is_quantized: whether the artifact is quantized. Rounding of float kernels does not matter then.
    """
    find_results = cache(partial(state.find_eager_results, graph))  # compares the weights once

    @torch.no_grad()
    def compute_reference(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = find_results()
        known = None if results is None else results.find(inputs)
        return (run_graph if is_quantized else compute_outputs)(graph, inputs) if known is None else known

    return compute_reference


def bind_exportable_graph(module: CompiledModule) -> Graph:
    """Return the graph of a module, bound to its weights.

    Raises:
        ModelError: it returns no tensor, or its weights were cast after it was traced.
    """
    graph = bind_graph(module)
    if not graph.outputs:
        raise ModelError(f"cannot export {graph.name}: it returns no tensor. Return at least one from the model.")
    cast = [(v, v.data.dtype) for v in graph.constants.values() if v.data is not None and v.data.dtype != v.type.dtype]
    if cast:
        value, dtype = cast[0]
        raise weight_dtype_error(value.name, dtype, value.type.dtype)
    return graph


def list_examples(module: CompiledModule, graph: Graph, given: Any) -> Sequence[Sequence[torch.Tensor]]:
    """Return inputs of the graph to compare an artifact on: the given ones, or the best that the module holds.

    Args:
        module: its calibration and tracing inputs are used.
        graph: that of the module, bound to its weights.
        given: one element as in ``tracing_inputs``; None for those of the module.

    Raises:
        ModelError: the given inputs do not fit the graph.
    """
    state = module.clika_state
    if given is None and state.calibration is not None:
        return take_batches(state.calibration.reservoir.batches, MIN_MARGIN_SAMPLES)
    if given is None and state.examples:
        return state.examples
    if given is None:
        dummy = _graph_inputs(state, (), generate_dummy_inputs(module))
        return [list(choose_example(graph, dummy))]
    call = pack_arguments(state.signature.parameters, convert_arrays(given, "example_inputs"))
    return [_graph_inputs(state, call.args, call.kwargs)]


def _graph_inputs(state: CompiledState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    inputs = state.signature.graph_inputs(state.signature.flatten(args, kwargs))
    check_inputs(state.graph, inputs)
    return inputs


def generate_dummy_inputs(module: CompiledModule) -> dict[str, Any]:
    """Return dummy inputs of the traced shapes by argument, on the device of the weights."""
    state = module.clika_state
    return make_dummy_inputs(state.graph, state.signature, device_of_weights(module))
