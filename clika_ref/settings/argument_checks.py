"""Validate the arguments of ``clika_compile`` before any work starts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from clika_ref.capture.inputs import check_iterable
from clika_ref.core.errors import ModelError
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings
from clika_ref.torch_internals.modules import TORCHSCRIPT_TYPES

SHOWN_LENGTH = 200
"""Maximum number of characters of a wrong value in an error."""

BOOL_ARGUMENTS = (
    "discard_input_model",
    "is_model_pretrained",
    "is_dry_run",
    "skip_eval_set_mode",
    "fullgraph",
    "dynamic",
    "disable",
)
"""Arguments that must be a bool; truthy values such as ``"no"`` are rejected."""

ARGUMENT_TYPES: Mapping[str, tuple[Any, str]] = {
    "deployment_settings": (
        BaseDeploymentSettings,
        "deployment settings, such as DeploymentSettings_ONNXRuntime_ONNX(), or None",
    ),
    "quantization_settings": (QuantizationSettings, "a QuantizationSettings, or None for a float model"),
    "layer_quantization_settings": (Mapping, "a dict from the names of layers to LayerQuantizationSettings, or None"),
    "pruning_settings": (PruningSettings, "a PruningSettings, or None for no pruning"),
    "lora_settings": (LoraSettings, "a LoraSettings, such as LoraSettings(rank=8), or None"),
    "layer_pruning_settings": (Mapping, "a dict from the names of layers to LayerPruningSettings, or None"),
    "clika_compile_options": (
        ClikaCompileOptions,
        "a ClikaCompileOptions, such as ClikaCompileOptions(check_passes=True), or None",
    ),
    "logs_dir": ((str, PathLike), "the path of a folder, or None"),
    "graph_name": (str, "a str, or None for the class of the model"),
}
"""Expected types of the other arguments, with a description for messages; all default to None."""

LAYER_SETTINGS_TYPES: Mapping[str, type] = {
    "layer_quantization_settings": LayerQuantizationSettings,
    "layer_pruning_settings": LayerPruningSettings,
}
"""The settings class for single layers, by argument."""

CALLABLE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "data_transform_fn": ("element",),
    "forward_fn": ("model", "args", "kwargs"),
}
"""Arguments that are functions, with the parameters that each is called with."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``clika_compile``, given by name.

    Raises:
        ModelError: an argument has the wrong type, or asks for a feature that this version lacks.
        ValueError: quantization settings without deployment settings or calibration inputs.
    """
    for name in BOOL_ARGUMENTS:
        automatic = name == "dynamic" and arguments[name] is None  # the default of torch.compile
        if not isinstance(arguments[name], bool) and not automatic:
            raise _wrong_type_error(name, arguments[name], "True or False")
    check_types(arguments)
    _check_quantization(arguments)
    if arguments["layer_pruning_settings"] and arguments["pruning_settings"] is None:
        raise ModelError(
            "cannot prune single layers: layer_pruning_settings are given without pruning_settings. Give both."
        )


def check_types(arguments: Mapping[str, Any]) -> None:
    """Check the types of arguments that have the same meaning as in `clika_compile`, by name; ignore all others.

    Raises:
        ModelError: an argument has the wrong type.
    """
    for name, (kind, accepted) in ARGUMENT_TYPES.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, kind):
            raise _wrong_type_error(name, value, accepted)
    for name, parameters in CALLABLE_PARAMETERS.items():
        if arguments.get(name) is not None:
            check_callable(name, arguments[name], parameters, is_optional=True)
    if arguments.get("calibration_inputs") is not None:
        check_iterable(arguments["calibration_inputs"], "calibration_inputs")
    for argument, kind in LAYER_SETTINGS_TYPES.items():
        for name, settings in (arguments.get(argument) or {}).items():
            if not isinstance(name, str) or not isinstance(settings, kind):
                raise _wrong_type_error(argument, {name: settings}, f"a dict from names of layers to {kind.__name__}")


def reject_torchscript(module_or_func: Any) -> None:
    """Reject TorchScript modules and functions: they hold no Python code to trace.

    Raises:
        ModelError: the argument is a script module, function or method.
    """
    if isinstance(module_or_func, TORCHSCRIPT_TYPES):
        name = getattr(module_or_func, "original_name", getattr(module_or_func, "name", ""))
        raise ModelError(
            f"cannot compile {name!r}: it is a {type(module_or_func).__name__}, made by torch.jit.trace or "
            "torch.jit.script. Pass the original nn.Module or function that was given to torch.jit."
        )


def check_callable(name: str, function: Any, parameters: tuple[str, ...], *, is_optional: bool = False) -> None:
    """Check that a function accepts the given positional parameters.

    Raises:
        ModelError: it is not callable, or does not accept them.
    """
    form = f"{name}({', '.join(parameters)})"
    if not callable(function):
        raise _wrong_type_error(name, function, f"a function that is called as {form}{', or None' * is_optional}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # no signature is available, as for some builtins
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ModelError(
            f"{name} takes {signature}, but is called as {form}: {error}. Give a function with these parameters."
        ) from error


def _check_quantization(arguments: Mapping[str, Any]) -> None:
    settings = arguments["quantization_settings"]
    if settings is not None:
        for name in ("deployment_settings", "calibration_inputs"):
            if arguments[name] is None and not (name == "calibration_inputs" and settings.dynamic_activations):
                raise ValueError(f"cannot quantize: quantization_settings are given without {name}. Give both.")
    elif arguments["layer_quantization_settings"]:
        raise ModelError(
            "cannot quantize single layers: layer_quantization_settings are given without "
            "quantization_settings. Give both."
        )


def _wrong_type_error(name: str, value: Any, accepted: str) -> ModelError:
    is_tensor = isinstance(value, torch.Tensor)
    shown = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else textwrap.shorten(repr(value), SHOWN_LENGTH)
    return ModelError(f"{name} is {shown}, a {type(value).__name__}. Give {accepted}.")
