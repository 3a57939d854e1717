"""Run a compiled module as the original is called: check inputs, and compute in float, trained or simulated."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from clika_ref.capture.caches import update_caches
from clika_ref.capture.origins import user_stacklevel
from clika_ref.capture.surrounding_autocast import outside_autocast, surrounding_autocast
from clika_ref.compiled.state import (
    EMPTY_MODULE,
    CompiledModule,
    CompiledState,
    read_tensors,
    require_simulation,
    require_training_executor,
    update_simulation,
    update_simulation_for_tracer,
)
from clika_ref.core.errors import ClikaWarning, ModelError, format_count
from clika_ref.core.execution import read_sizes
from clika_ref.core.guards import check_inputs
from clika_ref.module.fsdp import broadcast_buffers, unshard_weights
from clika_ref.settings.compile_options import BatchNormMode

OWN_FORWARD = "_clika_forward"
"""The attribute that holds the graph's own forward, as a function of the module."""

MAX_CHECKED_SHAPES = 4096
"""Maximum number of input shape combinations to remember as checked; further ones are checked on every call."""

AUTOCAST_MISMATCH = (
    "{} is called {}, but was compiled {}, and computes as compiled. Compile it under the autocast of its calls."
)

IDLE_DROPOUTS_WARNING = (
    "{} was traced in eval mode, and trains without its {}, as the artifact runs. "
    "Regularize in another way: weight decay, data augmentation, or distillation_loss."
)


def call(module: CompiledModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a module with the arguments of the original.

    Raises:
        ModelError: the arguments do not match the graph.
    """
    signature = module.clika_state.signature
    result = call_with_leaves(module, signature.flatten(args, kwargs))
    return update_caches((args, kwargs), result) if signature.takes_caches else result


def call_with_leaves(module: CompiledModule, leaves: Sequence[Any]) -> Any:
    """Call a module with the leaves of its arguments, in the order of its signature: tensors, and constants as traced.

    Raises:
        ModelError: the leaves do not match the graph.
    """
    state = module.clika_state
    signature = state.signature
    inputs = signature.graph_inputs(leaves)
    _check_inputs(state, inputs)
    if signature.autocast is None:
        results = _compute_outputs(module, inputs)
    else:
        _warn_of_autocast(state.graph.name, signature.autocast)
        with outside_autocast():
            results = _compute_outputs(module, inputs)
    sizes = read_sizes(state.graph, inputs) if signature.needs_sizes else {}
    return signature.unflatten(results, sizes)


def _check_inputs(state: CompiledState, inputs: list[torch.Tensor]) -> None:
    """Reject inputs that do not match the graph, which would silently return wrong results."""
    if torch.compiler.is_compiling():
        return  # sizes are symbols here; the tracer's own guards apply
    numbers = state.number_inputs
    key = tuple((int(t) if n else t.shape, t.dtype) for t, n in zip(inputs, numbers, strict=True))
    if key in state.accepted_shapes:
        return
    check_inputs(state.graph, inputs)
    if len(state.accepted_shapes) < MAX_CHECKED_SHAPES:
        state.accepted_shapes.add(key)


def _warn_of_autocast(name: str, compiled_in: str) -> None:
    """Warn if the autocast regions around a call differ from those that the graph was compiled in."""
    around = surrounding_autocast()
    if around != compiled_in:
        compiled, called = (f"in torch.autocast ({text})" if text else "outside" for text in (compiled_in, around))
        stacklevel = 2 if torch.compiler.is_compiling() else user_stacklevel()
        warnings.warn(AUTOCAST_MISMATCH.format(name, called, compiled), ClikaWarning, stacklevel)


def _compute_outputs(module: CompiledModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the graph; a quantized module uses fake quantization in train mode, and the simulation in eval mode.

    Raises:
        ModelError: ``torch.compile`` traces the call, and the current weights cannot be quantized.
    """
    state = module.clika_state
    if state.quantized is None:
        assert state.float_executor is not None
        return state.float_executor(module, inputs, has_live_norms=state.options.batch_norm == "live")
    if module.training:
        return require_training_executor(module)(module, inputs)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        problem = update_simulation_for_tracer(module)
        if problem is not None:
            raise ModelError(problem)
    return require_simulation(state)(state.graph, lambda: read_tensors(module), inputs)


def prepare_execution(module: CompiledModule) -> None:
    """Build the training executor or the simulation of a quantized module, according to its mode."""
    with unshard_weights(module):
        if module.training:
            require_training_executor(module)
        else:
            update_simulation(module)


def rebuild_training_executor(module: CompiledModule) -> None:
    """Build the training executor at once, since a tracer cannot build it in the next call, if there is a target."""
    state = module.clika_state
    if state.quantized is not None and state.quantized.target in state.registry.targets:
        require_training_executor(module)


def set_batch_norm(module: CompiledModule, batch_norm: BatchNormMode) -> None:
    """Make the batch norms of a module frozen or live; if its weights are sharded, all ranks call it.

    Raises:
        ModelError: the value is neither, or the norms cannot be live.
    """
    broadcast_buffers(module)
    state = module.clika_state
    before, executor = state.options, state.training_executor
    state.options, state.training_executor = replace(before, batch_norm=batch_norm), None
    try:
        if executor is not None:
            with unshard_weights(module):
                require_training_executor(module)
    except ModelError:
        state.options, state.training_executor = before, executor
        raise


def warn_of_idle_dropouts(state: CompiledState) -> None:
    """Warn, once, if training starts and dropouts were traced in eval mode."""
    if state.idle_dropouts:
        msg = IDLE_DROPOUTS_WARNING.format(state.graph.name, format_count(state.idle_dropouts, "dropout"))
        warnings.warn(msg, ClikaWarning, stacklevel=user_stacklevel())
        state.idle_dropouts = 0


class ClassCallableMethod(property):
    """A method that can also be called on the class: tools inspect ``type(module).forward`` for argument names."""

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method on a module, as in ``Class.method(module, ...)``."""
        return self.__get__(module)(*args, **kwargs)


def set_forward(module: CompiledModule) -> None:
    """Make the graph's own ``forward`` at once: the next call may come from a tracer, which cannot make it."""
    signature = module.clika_state.signature.call_signature

    def forward(clika_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(clika_module, args, kwargs)

    own = inspect.Parameter("clika_module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    module.__dict__[OWN_FORWARD] = forward


def own_forward(module: CompiledModule) -> Callable[..., Any]:
    """Return the graph's own ``forward``, bound to a module."""
    return module.__dict__.get(OWN_FORWARD, _reject_empty).__get__(module)  # dynamo does not support MethodType


def _reject_empty(*_: Any, **__: Any) -> None:
    """Raise the error for a call of an empty module."""
    raise ModelError(EMPTY_MODULE)
