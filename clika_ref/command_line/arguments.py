"""What the command line names: the model behind ``package.module:factory``, and example inputs by their shapes."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import torch

from clika_ref.core.errors import ModelError
from clika_ref.importing import find_object
from clika_ref.settings import BaseDeploymentSettings, full_name

INPUT_FORM = (
    "write sides joined by x (1x3x224x224), a dtype before a colon (int64:1x128), a keyword before an equals sign "
    "(input_ids=int64:1x128), `scalar` for no sides, and commas between the inputs of one call"
)

PART = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<dtype>\w+):)?(?P<shape>\d+(?:x\d+)*|scalar)")

DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"  # leaves out aliases: long, half
}


def load_model(text: str) -> torch.nn.Module:
    """Return the module that ``package.module:factory`` names: an instance, a class or a callable without arguments.

    Raises:
        ModelError: there is no such thing, it fails, or it makes no module.
    """
    place, _, path = text.partition(":")
    if not path or place.endswith(".py") or "/" in place:
        hint = f"{Path(place).stem}:{path or 'Net'}" if place.endswith(".py") else "package.module:Net"
        msg = f"{text!r} names no model: write the module and what makes the model in it, for example {hint}"
        raise ModelError(msg)
    made = find_object(place, path, ModelError, remedy="; --debug shows where")
    if not isinstance(made, torch.nn.Module) and callable(made):
        made = _call(text, made)
    if not isinstance(made, torch.nn.Module):
        msg = f"{text} is a {type(made).__name__}; name a torch.nn.Module, its class, or a function that returns one"
        raise ModelError(msg)
    return made


def _call(text: str, factory: Any) -> Any:
    try:
        return factory()
    except Exception as error:
        msg = f"{text}() raised {type(error).__name__}: {error}; --debug shows where. It is called without arguments."
        raise ModelError(msg) from error


def deployment_settings(target: str) -> BaseDeploymentSettings:
    """Return the settings of a target by its name or a short one, of a plugin's own too; compiling finds it or not."""
    name = full_name(target)
    for settings in BaseDeploymentSettings.__subclasses__():
        if name and settings.target == name:  # those of retired targets have no name
            return settings()
    return type("DeploymentSettings", (BaseDeploymentSettings,), {"target": name, "framework": name})()


def example_input(text: str) -> Any:
    """Return one element of tracing inputs: ``1x3x8x8``, ``int64:1x128``, ``1x3,int64:1``, ``x=1x3,mask=bool:1``.

    Floats are drawn from the normal distribution, integers from 0 and 1, which are legal as indices of nearly anything.

    Raises:
        ModelError: the text has another form, or names an unknown dtype.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None:
            msg = f"--input {text!r}: cannot read {part!r}; {INPUT_FORM}"
            raise ModelError(msg)
        name, dtype, shape = found["name"], found["dtype"] or "float32", found["shape"]
        if dtype not in DTYPES:
            near = difflib.get_close_matches(dtype, DTYPES, n=1) or ["float32"]
            msg = f"--input {text!r}: PyTorch has no dtype {dtype!r}; did you mean {near[0]}?"
            raise ModelError(msg)
        if name in kwargs or (name is None and kwargs):
            problem = f"{name!r} is given twice" if name else f"{part!r} has no keyword but follows one that has"
            msg = f"--input {text!r}: {problem}; keywords come last, each once"
            raise ModelError(msg)
        tensor = _draw(DTYPES[dtype], [] if shape == "scalar" else [int(side) for side in shape.split("x")])
        if name is None:
            args.append(tensor)
        else:
            kwargs[name] = tensor
    if args and kwargs:
        return (*args, kwargs)
    return kwargs or (args[0] if len(args) == 1 else tuple(args))


def _draw(dtype: torch.dtype, sides: list[int]) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex64 if dtype.is_complex else torch.float32  # float8 and others cannot be drawn directly
        return torch.randn(sides, dtype=drawn).to(dtype)
    return torch.randint(2, sides).to(dtype)
