"""``clika_compile``: what the user may ask for. The road that it takes from there is told in `clika_ref.road`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from clika_ref.argument_checks import check_arguments
from clika_ref.capture.inputs import ForwardFn
from clika_ref.distributed.ranks import working_together
from clika_ref.distributed_settings import DistributedTrainingSettings
from clika_ref.pruning_settings import LayerPruningSettings, PruningSettings
from clika_ref.quantization_settings import LayerQuantizationSettings, QuantizationSettings
from clika_ref.settings import BaseDeploymentSettings, Choices, ClikaCompileOptions

if TYPE_CHECKING:
    from clika_ref.module import ClikaModule

ModelArgType = torch.nn.Module | Callable[..., Any]
AnyCallable = Callable[..., Any]


# What is returned depends on two of the arguments; a type checker wants the others repeated to know it.
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
            the one dict that ``forward`` takes), or a tuple that ends in a dict. Values do not matter, structure does.
            A side that differs between two elements is dynamic. By default the calibration inputs.
        calibration_inputs: representative data, read once: a list, a generator, a DataLoader. Elements are as those of
            ``tracing_inputs``, in whose place some are traced with where these are None. Given beside these without
            ``quantization_settings``, they are kept for `ClikaModule.clika_initialize_algorithms`, which reads them.
        deployment_settings: where the model will run; by default ONNX Runtime, chosen when it is exported.
        data_transform_fn: applied to each element first, for example ``lambda x: x.to("cuda")``.
        forward_fn: how an element is fed, ``forward_fn(model, args, kwargs)``: the call that it makes of the model is
            what is traced, without contexts that it enters, such as autocast. A dict whose keys are no parameters of
            ``forward`` comes as ``args[0]``.
        quantization_settings: how far to quantize; None leaves the model float. Needs ``deployment_settings`` and
            ``calibration_inputs``.
        layer_quantization_settings: what is otherwise for single layers, by the path of a module, the name of a node,
            or either with wildcards.
        pruning_settings: how far to prune, before anything is quantized; None leaves the model whole.
        layer_pruning_settings: what is otherwise for single layers, as above.
        distributed_training_settings: whether the processes of ``torch.distributed`` compile together, each with data
            of its own; then all of them call this. None, as ``multi_gpu=False``, lets each work by itself.
        logs_dir: folder for the full log; None writes no file.
        clika_compile_options: see `ClikaCompileOptions`.
        discard_input_model: the compiled module takes over the weights of the original, which costs no memory; False
            copies them, and the original stays bit-identical whatever happens to the copy. With True, a ``forward``
            that writes to its own parameters leaves on them what the runs on the tracing inputs wrote.
        is_model_pretrained: False says that the weights are random: it changes nothing but for a warning of the log
            where they are quantized, as that decides by them.
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
    arguments = locals()  # and nothing else yet
    # torch.export and sympy take a second to load: the first compilation waits for them, not the import.
    from clika_ref.road import Given, compile_model  # noqa: PLC0415

    with working_together(distributed_training_settings) as ranks:
        check_arguments(arguments)
        inputs = (tracing_inputs, calibration_inputs, data_transform_fn, forward_fn)
        settings = (quantization_settings, layer_quantization_settings, pruning_settings, layer_pruning_settings)
        given = Given(*inputs, *settings, distributed_training_settings)
        choices = Choices(discard_input_model, is_model_pretrained, skip_eval_set_mode, dynamic, is_dry_run, graph_name)
        options = (clika_compile_options or ClikaCompileOptions()).with_extra(extra_options)
        where = {"deployment": deployment_settings, "logs_dir": logs_dir, "ranks": ranks}
        return compile_model(module_or_func, given, choices, options=options, **where)
