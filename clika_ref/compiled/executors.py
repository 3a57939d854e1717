"""The executors of a compiled module, each built on first use and kept in its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.simulation import Simulation
from clika_ref.compiled.state import CompiledModule, CompiledState, bind_graph, log_scales_of
from clika_ref.compiled.training_execution import TrainingExecutor
from clika_ref.compiled.weights import device_of_weights, weights_of


def read_tensors(module: CompiledModule) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return the weights of a module by the names of the graph's constants, and its log scales."""
    return weights_of(module, module.clika_state.graph), log_scales_of(module)


def require_simulation(state: CompiledState) -> Simulation:
    """Return the simulation of the quantized artifact, created on first use."""
    if state.simulation is None:
        assert state.quantized is not None
        state.simulation = Simulation(state.quantized, state.registry)
    return state.simulation


def update_simulation(module: CompiledModule) -> None:
    """Quantize the current weights again, if they have changed."""
    state = module.clika_state
    require_simulation(state).prepare(state.graph, *read_tensors(module), compare_elements=True)


def require_training_executor(module: CompiledModule) -> TrainingExecutor:
    """Return the training executor; it is rebuilt after the module has moved to another device."""
    state = module.clika_state
    executor = state.training_executor
    if executor is not None and (torch.compiler.is_compiling() or executor.device == device_of_weights(module)):
        return executor
    quantized = state.quantized
    assert quantized is not None
    with torch.inference_mode(mode=False), outside_autocast():
        executor = TrainingExecutor(
            bind_graph(module), quantized, log_scales_of(module), state.registry, state.options.batch_norm
        )
    if executor.quantized.plan.norms.keys() != quantized.plan.norms.keys():  # scales follow these norms now
        state.quantized, state.simulation = executor.quantized, None
    state.training_executor = executor
    return executor
