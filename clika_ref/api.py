"""``clika_compile``: its signature and argument checks. The compilation itself is in `clika_ref.pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.memory_limits import freeze_gc
from clika_ref.distributed.ranks import open_ranks
from clika_ref.settings.argument_checks import check_arguments
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

if TYPE_CHECKING:
    from clika_ref.module.clika_module import ClikaModule

ModelArgType = torch.nn.Module | Callable[..., Any]
AnyCallable = Callable[..., Any]


# The return type depends on two of the arguments; a type checker needs the others repeated.
@overload
def clika_compile(
    module_or_func: ModelArgType,
    *,
    tracing_inputs: Iterable[Any] | None = ...,
    calibration_inputs: Iterable[Any] | None = ...,
    deployment_settings: BaseDeploymentSettings | None = ...,
    data_transform_fn: AnyCallable | None = ...,
    forward_fn: ForwardFn | None = ...,
    quantization_settings: QuantizationSettings | None = ...,
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = ...,
    pruning_settings: PruningSettings | None = ...,
    layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = ...,
    distributed_training_settings: DistributedTrainingSettings | None = ...,
    logs_dir: Path | str | None = ...,
    clika_compile_options: ClikaCompileOptions | None = ...,
    discard_input_model: bool = ...,
    is_model_pretrained: bool = ...,
    is_dry_run: Literal[False] = ...,
    skip_eval_set_mode: bool = ...,
    graph_name: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    disable: Literal[False] = ...,
    **extra_options: Any,
) -> ClikaModule: ...
@overload
def clika_compile(
    module_or_func: ModelArgType,
    *,
    tracing_inputs: Iterable[Any] | None = ...,
    calibration_inputs: Iterable[Any] | None = ...,
    deployment_settings: BaseDeploymentSettings | None = ...,
    data_transform_fn: AnyCallable | None = ...,
    forward_fn: ForwardFn | None = ...,
    quantization_settings: QuantizationSettings | None = ...,
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = ...,
    pruning_settings: PruningSettings | None = ...,
    layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = ...,
    distributed_training_settings: DistributedTrainingSettings | None = ...,
    logs_dir: Path | str | None = ...,
    clika_compile_options: ClikaCompileOptions | None = ...,
    discard_input_model: bool = ...,
    is_model_pretrained: bool = ...,
    is_dry_run: bool = ...,
    skip_eval_set_mode: bool = ...,
    graph_name: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    disable: bool = ...,
    **extra_options: Any,
) -> torch.nn.Module | ClikaModule: ...
def clika_compile(
    module_or_func: ModelArgType,
    *,
    tracing_inputs: Iterable[Any] | None = None,
    calibration_inputs: Iterable[Any] | None = None,
    deployment_settings: BaseDeploymentSettings | None = None,
    data_transform_fn: AnyCallable | None = None,
    forward_fn: ForwardFn | None = None,
    quantization_settings: QuantizationSettings | None = None,
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
    pruning_settings: PruningSettings | None = None,
    layer_pruning_settings: Mapping[str, LayerPruningSettings] | None = None,
    distributed_training_settings: DistributedTrainingSettings | None = None,
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
            the one dict that ``forward`` takes), or a tuple that ends in a dict. NumPy arrays become tensors. Values do
            not matter, structure does. A dim that differs between two elements is dynamic. By default the calibration
            inputs.
        calibration_inputs: representative data, read once: a list, a generator, a DataLoader. Elements have the same
            form as in ``tracing_inputs``; if these are None, some calibration inputs are used for tracing. Given
            together with ``tracing_inputs`` but without ``quantization_settings``, they are kept for
            `ClikaModule.clika_initialize_algorithms`.
        deployment_settings: the deployment target; by default ONNX Runtime, chosen at export.
        data_transform_fn: applied to each element first, for example ``lambda x: x.to("cuda")``.
        forward_fn: how to call the model on an element: ``forward_fn(model, args, kwargs)``. Its call of the model is
            traced, without contexts that it enters, such as autocast. A dict with keys that are no parameters of
            ``forward`` is passed as ``args[0]``.
        quantization_settings: how to quantize; None keeps the model float. Needs ``deployment_settings`` and, unless
            ``dynamic_activations`` is set, ``calibration_inputs``.
        layer_quantization_settings: overrides for single layers; a key is a module path, a node name, or either with
            wildcards.
        pruning_settings: how to prune, before quantization; None keeps all weights.
        layer_pruning_settings: overrides for single layers, with keys as above.
        distributed_training_settings: whether the processes of ``torch.distributed`` compile together, each with its
            own data; then all of them must call this. None, like ``multi_gpu=False``, lets each work alone.
        logs_dir: folder for the full log; None writes no file.
        clika_compile_options: see `ClikaCompileOptions`.
        discard_input_model: share the weights with the original, which costs no memory; False copies them, and the
            original stays bit-identical. With True, a ``forward`` that writes to its own parameters leaves the values
            written while it ran on the tracing inputs.
        is_model_pretrained: False: the weights are random. It only adds a warning to the log if the model is
            quantized, since quantization depends on the weights.
        is_dry_run: report the planned steps and return the original model.
        skip_eval_set_mode: do not call ``model.eval()`` before tracing.
        graph_name: name of the graph; by default the class of the model.
        fullgraph: raise an error if the model cannot be captured as one graph. With False, it is compiled in pieces
            then, with Python between them, and the result is a `PartialClikaModule`.
        dynamic: False makes every dim static; inputs that differ are an error then. None means True, as in
            ``torch.compile``.
        disable: return the original model untouched.
        extra_options: fields of `ClikaCompileOptions` by name.

    Returns:
        The compiled module; the original one if ``disable`` or ``is_dry_run`` is set.

    Raises:
        ValueError: quantization settings without deployment settings or calibration inputs.
        ModelError: the model or an input is not supported; the message names it, its place and the fix.
        PluginError: an installed plugin is broken.
        TargetError: no plugin provides the target.
    """
    if disable is True:  # before any other check; values that are merely truthy are rejected below
        return module_or_func  # type: ignore[return-value]
    arguments = locals()  # only the arguments at this point
    with freeze_gc(), open_ranks(distributed_training_settings) as ranks:
        # Importing torch.export and sympy takes a second, so the first compilation pays for it and not the import.
        from clika_ref.pipeline import CompileRequest, compile_model  # noqa: PLC0415

        check_arguments(arguments)
        options = (clika_compile_options or ClikaCompileOptions()).with_extra(extra_options)
        checked: dict[str, Any] = arguments | {"clika_compile_options": options}
        if calibration_inputs is None and quantization_settings is not None:  # with dynamic activations
            shared = [*tracing_inputs] if isinstance(tracing_inputs, Iterator) else tracing_inputs
            checked |= {"tracing_inputs": shared, "calibration_inputs": shared}
        request = CompileRequest(**{field.name: checked[field.name] for field in fields(CompileRequest)})
        fallback = None
        if not fullgraph:
            from clika_ref.partial_graphs.compilation import compile_in_pieces  # noqa: PLC0415

            fallback = compile_in_pieces
        return compile_model(module_or_func, request, ranks, fallback)
