"""The compilation pipeline from a model to a ClikaModule: capture, clean, prune, add adapters, quantize, wrap."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clika_ref.capture.calibration_inputs import CalibrationInputs, LazyDataset
from clika_ref.capture.callables import TracedCallable, make_callable
from clika_ref.capture.capture import CaptureResult, capture
from clika_ref.capture.inputs import CALIBRATION_BATCH, TRACING_INPUT, ForwardFn, ModelCall, check_weights, make_calls
from clika_ref.capture.memory_limits import run_in_one_stack_chunk
from clika_ref.capture.messages import CaptureError
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.eager_results import EagerResults
from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.quantization_state import QuantizationState
from clika_ref.compiled.state import set_quantization
from clika_ref.compress.calibration_pass import NO_BATCHES_ERROR, prepare_calibration
from clika_ref.compress.graph_quantization import calibrate_graph, decide_quantization, iter_graph_inputs
from clika_ref.compress.prune import PRUNING_ON_TRACING_INPUTS
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.registry import Registry, clean_graph, load_registry
from clika_ref.core.targets import Target
from clika_ref.distributed.decisions import check_same_model, check_same_settings
from clika_ref.distributed.merging import gather_batches
from clika_ref.distributed.ranks import Ranks, broadcast_from_rank0, find_separate_processes
from clika_ref.export.dry_run import report_dry_run
from clika_ref.lora.adapters import freeze_base
from clika_ref.lora.attaching import attach_adapters, random_matrices
from clika_ref.module.clika_module import ClikaModule
from clika_ref.onnx_export.generic_operators import torchlib_operator
from clika_ref.pruning.batches import MIN_PRUNING_SAMPLES
from clika_ref.pruning.stages import PruningRequest, prune_graph
from clika_ref.quantization.calibration.calibrator import Calibration, take_batches
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.quantization.weight_checks import nan_warning
from clika_ref.reporting.console import is_in_command
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import LAYER_SETTINGS_TYPES, reject_torchscript
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings
from clika_ref.targets.size_statistics import symbol_sizes_of
from clika_ref.torch_internals.modules import DROPOUT

CALIBRATION_INPUTS_UNREAD = (
    "calibration_inputs are not read: tracing_inputs are given without quantization_settings. "
    "clika_initialize_algorithms() reads them."
)

RANGES_LOST = (
    "The ranges of {} are lost: calibration was interrupted. Set ClikaCompileOptions(ranges_file=...) "
    "to keep them, and repeat the call to resume."
)

FULLGRAPH_HINT = "clika_compile(..., fullgraph=False) compiles the model in pieces, with Python between them."

SUMMARY_HINT = "print(module.clika_summary()) shows the decision for each layer, and predictions for other thresholds"

UNTRAINED_WARNING = (
    "is_model_pretrained=False has no effect: quantization uses the current weights. Train first, then quantize "
    "with clika_initialize_algorithms()."
)


SWITCH_ARGUMENTS = (
    *("discard_input_model", "is_model_pretrained", "skip_eval_set_mode"),
    *("dynamic", "is_dry_run", "graph_name"),
)
"""Arguments that are logged with the options."""

COMPARED_ARGUMENTS = (
    *("deployment_settings", "quantization_settings", "pruning_settings", *LAYER_SETTINGS_TYPES),
    *("is_dry_run", "skip_eval_set_mode", "dynamic", "clika_compile_options"),
)
"""Arguments that must be equal on all ranks."""


@dataclass(frozen=True)
class CompileRequest:
    """Arguments of `clika_compile`, by their names."""

    tracing_inputs: Iterable[Any] | None
    calibration_inputs: Iterable[Any] | None
    data_transform_fn: Callable[[Any], Any] | None
    forward_fn: ForwardFn | None
    deployment_settings: BaseDeploymentSettings | None
    quantization_settings: QuantizationSettings | None
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None
    pruning_settings: PruningSettings | None
    layer_pruning_settings: Mapping[str, LayerPruningSettings] | None
    distributed_training_settings: DistributedTrainingSettings | None
    logs_dir: Path | str | None
    clika_compile_options: ClikaCompileOptions
    discard_input_model: bool
    is_model_pretrained: bool
    is_dry_run: bool
    skip_eval_set_mode: bool
    graph_name: str | None
    dynamic: bool | None

    @property
    def data(self) -> LazyDataset | None:
        """The calibration data."""
        if self.calibration_inputs is None:
            return None
        return LazyDataset(self.calibration_inputs, self.data_transform_fn, self.forward_fn)

    @property
    def unread(self) -> LazyDataset | None:
        """The calibration data, if this compilation does not quantize or trace with it; the module keeps it."""
        return self.data if self.quantization_settings is None and self.tracing_inputs is not None else None

    @property
    def is_pruned_with_data(self) -> bool:
        """Whether pruning reads the first batches of the calibration data, which the module can then read again."""
        return self.pruning_settings is not None and self.data is not None and self.data.is_rereadable


@run_in_one_stack_chunk
def compile_model(
    module_or_func: torch.nn.Module | Callable[..., Any],
    arguments: CompileRequest,
    ranks: Ranks,
    fallback: CompileFallback | None = None,
) -> torch.nn.Module:
    """Compile a model from the checked arguments of `clika_compile`.

    Args:
        module_or_func: the model.
        arguments: the checked arguments.
        ranks: the processes that compile together.
        fallback: compiles a model that no tracer captures as one graph; None to raise the error.
    """
    check_same_settings(_collect_settings_to_compare(arguments), ranks)
    callee = replace(
        _check_callee(module_or_func), is_preserved=not arguments.discard_input_model or arguments.is_dry_run
    )
    registry = _load_registry_for(arguments.deployment_settings)
    with CompilationLog.open(arguments.logs_dir, console=ranks.is_first) as log:
        log.write_header(_collect_settings_to_log(arguments))
        _warn_about_arguments(arguments, ranks, log)
        module = compile_callee(CompileContext(callee, arguments, registry, log, ranks, fallback))
    return module_or_func if module is None else module  # type: ignore[return-value]


def _check_callee(module_or_func: Any) -> TracedCallable:
    """Return the callable to compile; reject compiled modules, and weights that a graph cannot contain."""
    owner = getattr(module_or_func, "__self__", module_or_func)
    if isinstance(owner, ClikaModule) or hasattr(type(owner), "clika_pieces"):
        raise ModelError(
            f"cannot compile the module: it is a {type(owner).__name__} already. Compile the original model, or export "
            "this one with clika_export."
        )
    reject_torchscript(module_or_func)
    callee = make_callable(module_or_func)
    check_weights(callee.module)
    return callee


def _load_registry_for(deployment: BaseDeploymentSettings | None) -> Registry:
    """Load the plugins, and fail early if none provides the target."""
    registry = load_registry()
    if deployment is not None:
        target_for(deployment, registry)
    return registry


def _collect_settings_to_compare(arguments: CompileRequest) -> dict[str, Any]:
    """Return the arguments of `clika_compile` that must be equal on all ranks, by name."""
    found = {name: getattr(arguments, name) for name in COMPARED_ARGUMENTS}
    layers = {name: found[name] or None for name in LAYER_SETTINGS_TYPES}
    return found | layers | {"dynamic": arguments.dynamic is not False}


def _collect_settings_to_log(arguments: CompileRequest) -> dict[str, dict[str, Any]]:
    options, deployment = arguments.clika_compile_options, arguments.deployment_settings
    switches = {name: getattr(arguments, name) for name in SWITCH_ARGUMENTS}
    distributed = arguments.distributed_training_settings
    chosen = {
        "Quantization": arguments.quantization_settings,
        "Pruning": arguments.pruning_settings,
        "LoRA": options.global_lora_settings,
    }
    return {
        "Compilation Settings": {**switches, **vars(options)},
        **({"Distributed Training Settings": vars(distributed)} if distributed else {}),
        **{f"Global {name} Settings": vars(settings) for name, settings in chosen.items() if settings},
        "Deployment Settings": {"target_framework": deployment.framework if deployment else None},
    }


def _warn_about_arguments(arguments: CompileRequest, ranks: Ranks, log: CompilationLog) -> None:
    if arguments.quantization_settings is not None and not arguments.is_model_pretrained:
        log.warning(UNTRAINED_WARNING)
    if arguments.quantization_settings is not None and not ranks.is_distributed and find_separate_processes():
        log.warning(find_separate_processes())
    if arguments.unread is not None and not arguments.is_pruned_with_data:
        log.detail(CALIBRATION_INPUTS_UNREAD)


@dataclass(frozen=True)
class CompileContext:
    """The state of one compilation."""

    callee: TracedCallable
    arguments: CompileRequest
    registry: Registry
    log: CompilationLog
    ranks: Ranks
    fallback: CompileFallback | None = None
    """Compiles a model that no tracer captures as one graph."""

    @property
    def target(self) -> Target | None:
        """The deployment target."""
        deployment = self.arguments.deployment_settings
        return None if deployment is None else target_for(deployment, self.registry)


CompileFallback = Callable[
    [CompileContext, list[ModelCall], CalibrationInputs | None, CaptureError], torch.nn.Module | None
]
"""Compiles a model from the tracing inputs and the calibration data; None at the end of a dry run."""


def compile_callee(context: CompileContext) -> torch.nn.Module | None:
    """Run the pipeline; return None at the end of a dry run."""
    callee, arguments, registry, log = context.callee, context.arguments, context.registry, context.log
    request = make_quantization_request(context)
    with _evaluation_mode(context), _outside_inference_mode():
        calls, data = _prepare_calls(context)
        _warn_of_nan_weights(callee, log)
        try:
            captured = _capture(calls, context)
        except CaptureError as error:
            if context.fallback is None:
                error.add_note(FULLGRAPH_HINT)
                raise
            return context.fallback(context, calls, data, error)
        training, dropouts = callee.module.training, _count_idle_dropouts(callee.module)
        with outside_autocast():
            _clean(captured, context)
            eager_results = _take_eager_results(captured, context)  # before the weights change
            _prune(captured, data, context)
            _add_adapters(captured, context)
            if context.ranks.is_distributed:
                check_same_model(fingerprint(captured.graph), context.ranks)
            calibration, found = _quantize(captured, request, data, context) if request and data else (None, None)
            if arguments.is_dry_run:
                report_dry_run(captured.graph, registry, arguments.deployment_settings, log, found)
                return None
            module = _wrap(captured, context)
        if arguments.clika_compile_options.global_lora_settings is not None:
            freeze_base(module)
    _record_examples(module, captured, calibration, context.arguments)
    module.clika_state.idle_dropouts, module.clika_state.eager_results = dropouts, eager_results
    module.clika_state.record_log(log)
    if request is not None and calibration is not None and found is not None:
        quantized = QuantizationState(request.target.name, found.plan, calibration.model, found)
        set_quantization(module, quantized, calibration, request)
        if log.path is None and not is_in_command():
            log.show(SUMMARY_HINT)
    options, distributed = arguments.clika_compile_options, arguments.distributed_training_settings
    module.clika_state.configure(arguments.deployment_settings, options, arguments.logs_dir, distributed)
    return module.train(training)


@contextlib.contextmanager
def _evaluation_mode(context: CompileContext) -> Iterator[None]:
    """Set the model to eval mode, unless disabled; restore the mode if the caller may go on using the model.

    That is the case if the original is kept, if it is in the closure of a compiled function, and after a failure.
    """
    callee = context.callee
    modes = [(m, m.training) for m in callee.module.modules()]
    is_restored = True  # also after a failure
    if not context.arguments.skip_eval_set_mode:
        _set_eval(callee.module)
    try:
        yield
        is_restored = callee.is_preserved or callee.is_function
    finally:
        if is_restored:
            for module, training in modes:
                module.training = training


def _set_eval(module: torch.nn.Module) -> None:
    """Call ``eval()``, which some modules do not support."""
    try:
        module.eval()
    except NotImplementedError as error:
        raise ModelError(
            f"cannot set {type(module).__name__} to eval mode: {error} Compile the model that was exported, or "
            "pass skip_eval_set_mode=True to keep the mode of its export."
        ) from error


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, since tracers cannot follow its tensors; the gradient mode of the caller stays."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(is_grad_enabled):
        yield


def make_quantization_request(context: CompileContext) -> QuantizationRequest | None:
    """Return the quantization request; None if the model stays in float."""
    arguments, settings = context.arguments, context.arguments.quantization_settings
    if settings is None or context.target is None:
        return None
    return QuantizationRequest(
        context.target, settings, arguments.layer_quantization_settings or {}, arguments.clika_compile_options
    )


def _prepare_calls(context: CompileContext) -> tuple[list[ModelCall], CalibrationInputs | None]:
    """Return the calls to trace, and the calibration data; without tracing inputs, the calls are its first ones."""
    arguments, data = context.arguments, None
    if arguments.quantization_settings is not None and arguments.data is not None:
        data = arguments.data.start()
        if arguments.tracing_inputs is None:
            return data.examples(context.callee), data
    inputs, kind = arguments.tracing_inputs, TRACING_INPUT
    if inputs is None and arguments.calibration_inputs is not None:
        inputs, kind = arguments.calibration_inputs, CALIBRATION_BATCH
    return make_calls(context.callee, inputs, arguments.data_transform_fn, arguments.forward_fn, kind), data


def _warn_of_nan_weights(callee: TracedCallable, log: CompilationLog) -> None:
    warning = nan_warning(dict([*callee.module.named_parameters(), *callee.module.named_buffers()]))
    if warning is not None:
        log.warning(warning)


def _capture(calls: list[ModelCall], context: CompileContext) -> CaptureResult:
    callee, log = context.callee, context.log
    log.detail(f"Starting to parse the model: '{callee.name}'")
    with log.stage("Capturing") as stage:
        captured = capture(
            callee,
            calls,
            context.registry,
            fallback=torchlib_operator,
            dynamic=context.arguments.dynamic is not False,
            name=context.arguments.graph_name,
            convert_branches=context.arguments.clika_compile_options.convert_branches,
            detail=log.detail,
            progress=stage.update,
        )
        for note in captured.notes:
            log.detail(note)
        for warning in captured.warnings:
            log.warning(warning)
        slow = f"; slowest line: {captured.slow_line}" if captured.slow_line else ""
        stage.done(f"{format_count(len(captured.graph), 'node')} by {captured.tracer}{slow}")
    for symbol in captured.graph.symbols.values():
        log.detail(f"Dynamic: {symbol}")
    for guard in captured.graph.guards:
        log.detail(f"Guard: {guard}")
    return captured


def _count_idle_dropouts(model: torch.nn.Module) -> int:
    """Return how many dropouts are off, as in eval mode; functional calls are not counted."""
    dropouts = [module for module in model.modules() if isinstance(module, DROPOUT)]
    return sum(module.p > 0 and not module.training for module in dropouts)


def _clean(captured: CaptureResult, context: CompileContext) -> None:
    with context.log.stage("Cleaning") as stage:
        is_checked = context.arguments.clika_compile_options.check_passes
        example = captured.signature.graph_inputs(captured.calls[0]) if is_checked else None
        before = len(captured.graph)
        context.log.report_removals(clean_graph(captured.graph, context.registry, example))
        stage.done(f"{before:,} to {format_count(len(captured.graph), 'node')}")


def _take_eager_results(captured: CaptureResult, context: CompileContext) -> EagerResults | None:
    """Return the results of eager on the tracing inputs, with the hash of the weights; remove them from the capture."""
    results, captured.results = captured.results, []
    if context.arguments.is_dry_run or not context.arguments.clika_compile_options.compare_after_export:
        return None
    inputs = [captured.signature.graph_inputs(leaves) for leaves in captured.calls]
    return EagerResults.of(captured.graph, inputs, results)


def _prune(captured: CaptureResult, data: CalibrationInputs | None, context: CompileContext) -> None:
    """Prune the graph, if requested, with the first batches of the data, or else the tracing inputs."""
    arguments, signature = context.arguments, captured.signature
    if arguments.pruning_settings is None:
        return
    batches: Iterable[Sequence[torch.Tensor]] = map(signature.graph_inputs, captured.calls)
    if arguments.unread is not None and arguments.is_pruned_with_data:
        data = arguments.unread.start()
    if data is not None:
        batches = iter_graph_inputs(captured.graph, signature, data.peek(context.callee), context.log)
    elif arguments.tracing_inputs is not None:
        context.log.warning(PRUNING_ON_TRACING_INPUTS)
    request = PruningRequest(arguments.pruning_settings, arguments.layer_pruning_settings or {})
    is_per_rank = data is not None or arguments.tracing_inputs is None
    few = take_batches(batches, MIN_PRUNING_SAMPLES)
    chosen = take_batches(gather_batches(context.ranks, few, is_per_rank=is_per_rank), MIN_PRUNING_SAMPLES)
    if not chosen:
        raise ModelError(NO_BATCHES_ERROR)
    prune_graph(captured.graph, request, chosen, context.registry.operators, context.log)


def _add_adapters(captured: CaptureResult, context: CompileContext) -> None:
    """Attach adapters, if requested. The other parameters are frozen later, when the module is built."""
    settings = context.arguments.clika_compile_options.global_lora_settings
    if settings is not None:
        attach_adapters(captured.graph, settings, context.registry.operators, context.log)
        broadcast_from_rank0(context.ranks, random_matrices(captured.graph))


def _quantize(
    captured: CaptureResult, request: QuantizationRequest, data: CalibrationInputs, context: CompileContext
) -> tuple[Calibration, Quantization]:
    """Calibrate the graph and decide which layers to quantize."""
    batches = iter_graph_inputs(captured.graph, captured.signature, data.calls(context.callee), context.log)
    calibration = prepare_calibration(captured.graph, request, context.registry)
    common, ranks = (request, context.registry, context.log), context.ranks
    try:
        stages = calibrate_graph(calibration, batches, *common, model=captured.graph, total=data.count, ranks=ranks)
    except BaseException:  # including an interrupt
        if calibration.table.batches and not context.arguments.clika_compile_options.ranges_file:
            context.log.show(RANGES_LOST.format(format_count(calibration.table.batches, "batch")))
        raise
    return calibration, decide_quantization(stages, captured.graph, *common, ranks=ranks)


def _wrap(captured: CaptureResult, context: CompileContext) -> ClikaModule:
    """Build the module, on the weights of the original or on copies."""
    with context.log.stage("Wrapping") as stage:
        saved = frozenset(context.callee.module.state_dict(keep_vars=True))
        own = {n for n in captured.graph.constants if n.startswith("clika.")}
        if not context.arguments.discard_input_model:
            for value in captured.graph.constants.values():
                assert value.data is not None
                value.data = _copy_tensor(value.data)
        module = ClikaModule(captured.graph, captured.signature, persistent=saved | own, registry=context.registry)
        stage.done(format_count(len(captured.graph.constants), "tensor of weights and constants"))
    return module


def _copy_tensor(data: torch.Tensor) -> torch.Tensor:
    copy = data.detach().clone()
    return torch.nn.Parameter(copy, data.requires_grad) if isinstance(data, torch.nn.Parameter) else copy


def _record_examples(
    module: ClikaModule, captured: CaptureResult, calibration: Calibration | None, arguments: CompileRequest
) -> None:
    """Keep the traced calls and the unread calibration data in the state of the module."""
    state = module.clika_state
    state.examples = [captured.signature.graph_inputs(leaves) for leaves in captured.calls]
    calibrated = len(state.examples) if calibration is None else calibration.sizes.total()
    is_traced_whole = len(state.examples) >= calibrated  # tracing takes the first calls of the data only
    state.examples_are_data = arguments.tracing_inputs is None and is_traced_whole
    state.unread = arguments.unread
    state.example_sizes = Counter(symbol_sizes_of(state.graph, inputs) for inputs in state.examples)
