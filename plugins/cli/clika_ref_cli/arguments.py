"""Models from MODEL arguments: a factory, a saved module or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import clika_ref
from clika_ref_cli.artifacts import find_file_targets
from clika_ref_cli.exit_status import MisuseError
from clika_ref_cli.import_path import find_object

ONNX_SUFFIX = ".onnx"

EXAMPLE_FACTORY = "package.module:Net"


class ModelKind(Enum):
    """The kind of model that an argument names."""

    FACTORY = "a model that Python makes"
    SAVED = "a saved module"
    ONNX = "an ONNX file"
    TARGET_FILE = "a file of a target's own form"


def kind_of(text: str) -> ModelKind:
    """Return the kind of model that an argument names.

    Raises:
        MisuseError: the argument is a folder, or neither an existing file nor the name of a Python object.
    """
    path = Path(text)
    if path.is_dir():
        msg = f"{text} is a folder; give the file of a model in it"
        raise MisuseError(msg)
    if path.suffix == ".py" or (":" in text and not path.exists()):
        return ModelKind.FACTORY
    if not path.exists():
        msg = (
            f"there is no file {text}; for a model that Python makes write its module and what makes it: "
            f"{EXAMPLE_FACTORY}"
        )
        raise MisuseError(msg)
    if path.suffix.lower() == ONNX_SUFFIX:
        return ModelKind.ONNX
    return ModelKind.TARGET_FILE if find_file_targets(path) else ModelKind.SAVED


def require_kind(text: str, wanted: Sequence[ModelKind], remedy: str) -> ModelKind:
    """Return the kind of a model, and reject kinds that the command does not support.

    Args:
        text: the argument.
        wanted: the supported kinds.
        remedy: the hint for the message.

    Raises:
        MisuseError: the model is of another kind.
    """
    kind = kind_of(text)
    if kind not in wanted:
        msg = f"{text} is {kind.value}; {remedy}"
        raise MisuseError(msg)
    return kind


def reject_unused_inputs(kind: ModelKind, text: str, inputs: Sequence[str]) -> ModelKind:
    """Return the kind of a model, and reject ``--input`` for models that are not traced.

    Raises:
        MisuseError: the model is compiled already.
    """
    if kind is not ModelKind.FACTORY and inputs:
        msg = f"{text} is compiled already, and --input says what to trace with; leave it out"
        raise MisuseError(msg)
    return kind


def load_model(text: str) -> torch.nn.Module:
    """Return the module that ``package.module:factory`` names: an instance, a class or a callable without arguments.

    Raises:
        MisuseError: the object does not exist, fails, or is no module and makes none.
    """
    place, _, path = text.partition(":")
    if not path or place.endswith(".py") or "/" in place:
        hint = f"{Path(place).stem}:{path or 'Net'}" if place.endswith(".py") else EXAMPLE_FACTORY
        msg = f"{text!r} names no model: write the module and what makes the model in it, for example {hint}"
        raise MisuseError(msg)
    made = find_object(place, path, MisuseError, remedy="; --debug shows where")
    if not isinstance(made, torch.nn.Module) and callable(made):
        made = call_factory(text, made)
    if not isinstance(made, torch.nn.Module):
        kind = type(made).__name__
        msg = f"{text} is of type {kind}; name a torch.nn.Module, its class, or a function that returns one"
        raise MisuseError(msg)
    return made


def call_factory(text: str, factory: Callable[[], Any]) -> Any:
    """Call a function of the user without arguments.

    Raises:
        MisuseError: the function raises.
    """
    try:
        return factory()
    except (Exception, SystemExit) as error:  # a script may exit on unexpected arguments
        msg = f"{text}() raised {type(error).__name__}: {error}; --debug shows where. It is called without arguments."
        raise MisuseError(msg) from error


def load_compiled(text: str, inputs: Sequence[Any]) -> clika_ref.ClikaModule:
    """Return a model as a ClikaModule: loaded if saved, or else compiled in float.

    Raises:
        MisuseError: the model must be compiled, and no inputs are given.
        ModelError: the model cannot be compiled or loaded.
    """
    if (
        require_kind(text, [ModelKind.FACTORY, ModelKind.SAVED], "`clika-ref explain` and `compare` read it")
        is ModelKind.SAVED
    ):
        return clika_ref.ClikaModule.clika_load(text)
    model = load_model(text)
    if not inputs:
        msg = f"{text} is to be compiled, which takes --input: a shape such as 1x3x224x224, or a file of inputs"
        raise MisuseError(msg)
    module: Any = clika_ref.clika_compile(model, tracing_inputs=inputs)
    return module
