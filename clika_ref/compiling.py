"""``clika_compile``: the road from a model to a ClikaModule, told top to bottom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clika_ref.argument_checks import check_arguments, refuse_scripted
from clika_ref.capture.callables import Callee, callee_of
from clika_ref.capture.capturing import Captured, capture
from clika_ref.capture.collector import spared
from clika_ref.capture.inputs import ForwardFn, ModelCall, model_calls, refuse_odd_weights
from clika_ref.core.errors import ModelError
from clika_ref.core.passes import Phase, Pipeline
from clika_ref.core.registry import Registry, load_registry
from clika_ref.dry_run import report_dry_run
from clika_ref.exporting.export import target_for
from clika_ref.generic import torchlib_operator
from clika_ref.module import ClikaModule
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings import BaseDeploymentSettings, ClikaCompileOptions

ModelArgType = torch.nn.Module | Callable[..., Any]
AnyCallable = Callable[..., Any]

UNREAD = "The calibration_inputs are not read, as tracing_inputs are given: this version does not quantize"


def clika_compile(
    module_or_func: ModelArgType,
    *,
    tracing_inputs: Iterable[Any] | None = None,
    calibration_inputs: Iterable[Any] | None = None,
    deployment_settings: BaseDeploymentSettings | None = None,
    data_transform_fn: AnyCallable | None = None,
    forward_fn: ForwardFn | None = None,
    quantization_settings: Any = None,
    layer_quantization_settings: Mapping[str, Any] | None = None,
    logs_dir: Path | str | None = None,
    clika_compile_options: ClikaCompileOptions | None = None,
    discard_input_model: bool = True,
    is_model_pretrained: bool = True,
    is_dry_run: bool = False,
    skip_eval_set_mode: bool = False,
    graph_name: str | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = True,
    disable: bool = False,
    **extra_options: Any,
) -> torch.nn.Module | ClikaModule:
    """Compile a model to a ClikaModule: captured as one graph, cleaned, and verified against eager on every input.

    Args:
        module_or_func: an ``nn.Module``, a bound method of one (``model.infer``), or a function.
        tracing_inputs: one element per call: a tensor, a tuple of positional arguments, a dict of keyword arguments (or
            the one dict that ``forward`` takes), or a tuple that ends in a dict. Values do not matter, structure does.
            A side that differs between two elements is dynamic. By default the calibration inputs.
        calibration_inputs: representative data, read for tracing where ``tracing_inputs`` is None.
        deployment_settings: where the model will run; by default ONNX Runtime, chosen when it is exported.
        data_transform_fn: applied to each element first, for example ``lambda x: x.to("cuda")``.
        forward_fn: how an element is fed, ``forward_fn(model, args, kwargs)``: the call that it makes of the model is
            what is traced.
        quantization_settings: not available in this version.
        layer_quantization_settings: not available in this version.
        logs_dir: folder for the full log; None writes no file.
        clika_compile_options: see `ClikaCompileOptions`.
        discard_input_model: the compiled module takes over the weights of the original, which costs no memory; False
            copies them, and the original stays bit-identical whatever happens to the copy.
        is_model_pretrained: False says that the weights are random, so that nothing is decided by them.
        is_dry_run: report what would happen and return the original model.
        skip_eval_set_mode: do not call ``model.eval()`` before tracing.
        graph_name: name of the graph; by default the class of the model.
        fullgraph: one graph for the whole model; False is not available in this version.
        dynamic: False makes every side static; inputs that differ are an error then. None, as ``torch.compile`` has it,
            is True.
        disable: return the original model untouched.
        extra_options: fields of `ClikaCompileOptions` by name.

    Returns:
        The compiled module; the original one where ``disable`` or ``is_dry_run`` is set.

    Raises:
        ValueError: quantization settings without deployment settings or calibration inputs.
        ModelError: the model or an input cannot be served; the message says which, where and what to do.
        PluginError: an installed plugin is broken.
        TargetError: no plugin provides the target.

    """
    if disable is True:  # whatever else is given; what only counts as true is refused below
        return module_or_func  # type: ignore[return-value]
    check_arguments(locals())  # which are the arguments, and nothing else yet
    options = (clika_compile_options or ClikaCompileOptions()).with_extra(extra_options)
    callee = _callee(module_or_func)
    inputs = tracing_inputs if tracing_inputs is not None else calibration_inputs
    feed = partial(model_calls, callee, inputs, data_transform_fn, forward_fn)
    choices = Choices(discard_input_model, is_model_pretrained, skip_eval_set_mode, dynamic, is_dry_run, graph_name)
    registry = _registry_for(deployment_settings)
    with CompilationLog.open(logs_dir) as log:
        log.header(_echoed(choices, options, deployment_settings))
        if inputs is not calibration_inputs and calibration_inputs is not None:
            log.detail(UNREAD)
        module = _compile(callee, feed, registry, choices, log, options=options, deployment=deployment_settings)
    if module is None:
        return module_or_func  # type: ignore[return-value]
    module.clika_configure(deployment_settings, options, logs_dir)
    return module


@dataclass(frozen=True)
class Choices:
    """The switches of one compilation, under the names of the arguments of `clika_compile`."""

    discard_input_model: bool
    is_model_pretrained: bool
    skip_eval_set_mode: bool
    dynamic: bool | None
    is_dry_run: bool
    graph_name: str | None


def _compile(
    callee: Callee,
    feed: Callable[[], list[ModelCall]],
    registry: Registry,
    choices: Choices,
    log: CompilationLog,
    *,
    options: ClikaCompileOptions,
    deployment: BaseDeploymentSettings | None,
) -> ClikaModule | None:
    """Walk the road; return None where a dry run ends it."""
    with _evaluation_mode(callee, choices):
        calls = feed()
        _warn_of_weights(callee, log)
        captured = _capture(callee, calls, registry, choices, log)
        training = callee.module.training
    _clean(captured, registry, options, log)
    if choices.is_dry_run:
        report_dry_run(captured.graph, registry, deployment, log)
        return None
    module = _wrap(captured, callee, registry, choices, log)
    module.clika_remember([captured.signature.graph_inputs(leaves) for leaves in captured.calls], log.timings)
    return module.train(training)


def _registry_for(deployment: BaseDeploymentSettings | None) -> Registry:
    """Load the plugins; find out now rather than at the export that none provides the target."""
    registry = load_registry()
    if deployment is not None:
        target_for(deployment, registry)
    return registry


def _echoed(
    choices: Choices, options: ClikaCompileOptions, deployment: BaseDeploymentSettings | None
) -> dict[str, dict[str, Any]]:
    return {
        "Compilation Settings": {**vars(choices), **vars(options)},
        "Deployment Settings": {"target_framework": deployment.framework if deployment else None},
    }


def _capture(
    callee: Callee, calls: list[ModelCall], registry: Registry, choices: Choices, log: CompilationLog
) -> Captured:
    log.detail(f"Starting to parse the model: '{callee.name}'")
    with log.stage("Capturing") as stage, spared():
        captured = capture(
            callee,
            calls,
            registry,
            fallback=torchlib_operator,
            dynamic=choices.dynamic is not False,
            name=choices.graph_name,
            detail=log.detail,
            progress=stage.update,
        )
        for note in captured.notes:
            log.detail(note)
        slow = f"; slowest at {captured.slow_line}" if captured.slow_line else ""
        stage.done(f"{len(captured.graph):,} nodes by {captured.tracer}{slow}")
    for symbol in captured.graph.symbols.values():
        log.detail(f"Dynamic: {symbol}")
    for guard in captured.graph.guards:
        log.detail(f"Guard: {guard}")
    return captured


def _clean(captured: Captured, registry: Registry, options: ClikaCompileOptions, log: CompilationLog) -> None:
    with log.stage("Cleaning") as stage:
        example = captured.signature.graph_inputs(captured.calls[0]) if options.check_passes else None
        pipeline = Pipeline.of(registry.passes, registry.operators, Phase.CLEAN, check_inputs=example)
        before = len(captured.graph)
        log.removed(pipeline.run(captured.graph))
        stage.done(f"{before:,} to {len(captured.graph):,} nodes")


def _wrap(captured: Captured, callee: Callee, registry: Registry, choices: Choices, log: CompilationLog) -> ClikaModule:
    """Put the graph into a module, on the weights of the original or on copies of them."""
    with log.stage("Wrapping") as stage:
        saved = frozenset(callee.module.state_dict(keep_vars=True))
        own = {n for n in captured.graph.constants if n.startswith("clika.")}
        if not choices.discard_input_model:
            for value in captured.graph.constants.values():
                assert value.data is not None
                value.data = _copied(value.data)
        module = ClikaModule(captured.graph, captured.signature, persistent=saved | own, registry=registry)
        stage.done(f"{len(captured.graph.constants):,} weights and constants")
    return module


def _copied(data: torch.Tensor) -> torch.Tensor:
    copy = data.detach().clone()
    return torch.nn.Parameter(copy, data.requires_grad) if isinstance(data, torch.nn.Parameter) else copy


def _callee(module_or_func: Any) -> Callee:
    """Return what to compile; refuse what is compiled already, and weights that no graph can carry."""
    if isinstance(getattr(module_or_func, "__self__", module_or_func), ClikaModule):
        msg = "this module is compiled already; compile the original model, or export this one with clika_export"
        raise ModelError(msg)
    refuse_scripted(module_or_func)
    callee = callee_of(module_or_func)
    refuse_odd_weights(callee.module)
    return callee


def _warn_of_weights(callee: Callee, log: CompilationLog) -> None:
    named = [*callee.module.named_parameters(), *callee.module.named_buffers()]
    spoiled = [name for name, tensor in named if tensor.is_floating_point() and bool(tensor.isnan().any())]
    if spoiled:
        log.warning(f"NaN in the weights {', '.join(spoiled)}: whatever they touch becomes NaN")


@contextlib.contextmanager
def _evaluation_mode(callee: Callee, choices: Choices) -> Iterator[None]:
    """Set the model to eval mode, unless told not to; restore it where the original stays, as after a failure."""
    modes = [(m, m.training) for m in callee.module.modules()]
    stays = True
    if not choices.skip_eval_set_mode:
        callee.module.eval()
    try:
        yield
        stays = not choices.discard_input_model or choices.is_dry_run
    finally:
        if stays:
            for module, training in modes:
                module.training = training
