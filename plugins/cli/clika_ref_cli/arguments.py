"""Models from MODEL arguments: a factory, a saved module or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import clika_ref
from clika_ref_cli.artifacts import find_file_targets
from clika_ref_cli.exit_status import DEBUG_HINT, MisuseError
from clika_ref_cli.import_path import describe_raised, find_object

ONNX_SUFFIX = ".onnx"

EXAMPLE_FACTORY = "package.module:Net"

EXPLAIN_OR_COMPARE_HINT = "Use `clika-ref explain` or `clika-ref compare`."


class ModelKind(Enum):
    """Kinds of models in arguments."""

    FACTORY = "a Python model"
    SAVED = "a saved module"
    ONNX = "an ONNX file"
    TARGET_FILE = "a file in a target's own format"


def find_model_kind(text: str, inputs: Sequence[str] = ()) -> ModelKind:
    """Return the kind of model that an argument names.

    Args:
        text: the argument.
        inputs: values of ``--input``, which only models that are traced accept.

    Raises:
        MisuseError: the argument is a folder, or neither an existing file nor the name of a Python object; or inputs
            are given for a model that is already compiled.
    """
    kind = _find_kind(text)
    if kind is not ModelKind.FACTORY and inputs:
        raise MisuseError(f"cannot trace {text}: it is already compiled. Omit --input, which selects tracing inputs.")
    return kind


def _find_kind(text: str) -> ModelKind:
    path = Path(text)
    if path.is_dir():
        raise MisuseError(f"cannot load {text}: it is a folder. Give a model file in it.")
    if path.suffix == ".py" or (":" in text and not path.exists()):
        return ModelKind.FACTORY
    if not path.exists():
        raise MisuseError(
            f"cannot load {text}: there is no such file. For a Python model, give its module and factory, for example "
            f"{EXAMPLE_FACTORY}."
        )
    if path.suffix.lower() == ONNX_SUFFIX:
        return ModelKind.ONNX
    return ModelKind.TARGET_FILE if find_file_targets(path) else ModelKind.SAVED


def require_kind(text: str, supported: Sequence[ModelKind], remedy: str) -> ModelKind:
    """Return the kind of a model, and reject kinds that the command does not support.

    Args:
        text: the argument.
        supported: the supported kinds.
        remedy: a sentence for the message.

    Raises:
        MisuseError: the model is of another kind.
    """
    kind = find_model_kind(text)
    if kind not in supported:
        raise MisuseError(f"cannot use {text}: it is {kind.value}. {remedy}")
    return kind


def load_model(text: str) -> torch.nn.Module:
    """Return the module that ``package.module:factory`` names: an instance, a class or a callable without arguments.

    Raises:
        MisuseError: the object does not exist, raises an error, or is neither a module nor returns one.
    """
    module, _, path = text.partition(":")
    if not path or module.endswith(".py") or "/" in module:
        hint = f"{Path(module).stem}:{path or 'Net'}" if module.endswith(".py") else EXAMPLE_FACTORY
        raise MisuseError(f"cannot load {text!r}: it is not of the form module:factory. Write for example {hint}.")
    model = find_object(module, path, MisuseError, remedy=DEBUG_HINT)
    if not isinstance(model, torch.nn.Module) and callable(model):
        model = call_factory(text, model)
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise MisuseError(
            f"cannot load {text}: it is of type {kind}. Name a torch.nn.Module, its class, or a function for one."
        )
    return model


def call_factory(text: str, factory: Callable[[], Any]) -> Any:
    """Call a function of the user without arguments.

    Raises:
        MisuseError: the function raises.
    """
    try:
        return factory()
    except (Exception, SystemExit) as error:  # a script may exit on unexpected arguments
        raise MisuseError(f"cannot call {text}() without arguments: {describe_raised(error)}. {DEBUG_HINT}") from error


def load_compiled(text: str, inputs: Sequence[Any]) -> clika_ref.ClikaModule:
    """Return a model as a ClikaModule: loaded if saved, or else compiled in float.

    Raises:
        MisuseError: the model must be compiled, and no inputs are given.
        ModelError: the model cannot be compiled or loaded.
    """
    if require_kind(text, [ModelKind.FACTORY, ModelKind.SAVED], EXPLAIN_OR_COMPARE_HINT) is ModelKind.SAVED:
        return clika_ref.ClikaModule.clika_load(text)
    model = load_model(text)
    if not inputs:
        raise MisuseError(
            f"cannot compile {text}: --input is missing. Give a shape such as 1x3x224x224, or a file of inputs."
        )
    module: Any = clika_ref.clika_compile(model, tracing_inputs=inputs)
    return module
