"""Make anything callable look like a module: a module, a bound method of one, or a plain function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.errors import ModelError


@dataclass(frozen=True)
class Callee:
    """What is compiled: the module that owns the weights, and the function that one call runs."""

    module: torch.nn.Module
    function: Callable[..., Any]
    name: str

    @property
    def parameters(self) -> inspect.Signature:
        """The signature of a call."""
        return inspect.signature(self.function)

    @contextlib.contextmanager
    def as_module(self) -> Iterator[torch.nn.Module]:
        """Let the module's ``forward`` be the function, for as long as the context lasts."""
        module = self.module
        if self.function == module.forward:
            yield module
            return
        had = "forward" in module.__dict__
        original = module.__dict__.get("forward")
        module.__dict__["forward"] = self.function
        try:
            yield module
        finally:
            if had:
                module.__dict__["forward"] = original
            else:
                del module.__dict__["forward"]


class _Function(torch.nn.Module):
    """A plain function; the modules that it refers to are its children, so that their weights are found."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        for name, module in _modules_of(function).items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def callee_of(module_or_func: Any) -> Callee:
    """Return what to compile for a module, a bound method of a module, or a function.

    Raises:
        ModelError: it is none of these.
    """
    if isinstance(module_or_func, torch.nn.Module):
        return Callee(module_or_func, module_or_func.forward, type(module_or_func).__name__)
    owner = getattr(module_or_func, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return Callee(owner, module_or_func, f"{type(owner).__name__}_{module_or_func.__name__}")
    if callable(module_or_func) and not isinstance(module_or_func, type):
        name = getattr(module_or_func, "__name__", type(module_or_func).__name__)
        return Callee(_Function(module_or_func), module_or_func, "function" if name == "<lambda>" else name)
    msg = (
        f"cannot compile {module_or_func!r}, a {type(module_or_func).__name__}: "
        "pass an nn.Module, a bound method such as model.infer, or a function"
    )
    raise ModelError(msg)


def _modules_of(function: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """Return the modules that a function closes over or names as globals."""
    if not inspect.isfunction(function):
        owner = getattr(function, "__self__", function)
        return (
            {n: v for n, v in vars(owner).items() if isinstance(v, torch.nn.Module)}
            if hasattr(owner, "__dict__")
            else {}
        )
    outside = inspect.getclosurevars(function)
    return {n: v for n, v in {**outside.globals, **outside.nonlocals}.items() if isinstance(v, torch.nn.Module)}
