"""Wrap any callable as a module: a module, a bound method of one, or a plain function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clika_ref.capture.caches import run_with_caches
from clika_ref.capture.reachable_modules import find_reachable_modules
from clika_ref.core.errors import ModelError


@dataclass(frozen=True)
class TracedCallable:
    """The object to compile: the module that owns the weights, and the function that a call runs."""

    module: torch.nn.Module
    function: Callable[..., Any]
    name: str
    warnings: tuple[str, ...] = ()
    """Properties that the graph cannot keep."""
    is_preserved: bool = False
    """Whether the user keeps the module, so that writes to its parameters are undone; this takes a copy of them."""
    is_function: bool = False
    """Whether its modules are those that a function can reach; the function need not call all of them."""

    @property
    def parameters(self) -> inspect.Signature:
        """The signature of a call."""
        return inspect.signature(self.function)

    @property
    def is_forward(self) -> bool:
        """Whether a call runs the ``forward`` of the module."""
        return self.function == self.module.forward

    def with_explicit_arguments(self, arguments: Sequence[str]) -> TracedCallable:
        """Return a callable with an explicit parameter for each argument that ``**kwargs`` collects.

        torch.export 2.13 counts such arguments twice, alone and under the name of ``**kwargs``.
        """
        if all(name in self.parameters.parameters for name in arguments):
            return self
        signature = spell_out_keywords(self.parameters, arguments)
        return replace(self, function=_wrap(self.function, signature))

    def with_cache_trees(self, prepare: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> TracedCallable:
        """Return a callable that takes and returns trees in place of caches.

        Args:
            prepare: receives the arguments of a call, with trees, before the call runs.
        """
        function = self.function

        def run(*args: Any, **kwargs: Any) -> Any:
            prepare(args, kwargs)
            return run_with_caches(function, args, kwargs)

        return replace(self, function=_wrap(run, self.parameters))

    @contextlib.contextmanager
    def as_module(self) -> Iterator[torch.nn.Module]:
        """Set the module's ``forward`` to the function while the context lasts."""
        module = self.module
        if self.is_forward:
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


_FUNCTION_KEY = "the function"
"""The key of the function in a `_FunctionModule`. It has a space, so no variable or submodule has this name."""


class _FunctionModule(torch.nn.Module):
    """A plain function as a module. The modules that it can reach become submodules, so their weights are found."""

    def __init__(self, function: Callable[..., Any], children: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.__dict__[_FUNCTION_KEY] = function
        for name, module in children.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_FUNCTION_KEY](*args, **kwargs)


def make_callable(module_or_func: Any) -> TracedCallable:
    """Return the `TracedCallable` for a module, a bound method of a module, or a function.

    Raises:
        ModelError: the argument is none of these.
    """
    if isinstance(module_or_func, torch.nn.Module):
        return TracedCallable(module_or_func, module_or_func.forward, type(module_or_func).__name__)
    owner = getattr(module_or_func, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return TracedCallable(owner, module_or_func, f"{type(owner).__name__}_{module_or_func.__name__}")
    if callable(module_or_func) and not isinstance(module_or_func, type):
        name = getattr(module_or_func, "__name__", type(module_or_func).__name__)
        found = find_reachable_modules(module_or_func)
        return TracedCallable(
            _FunctionModule(module_or_func, {n: m for n, m in found.items() if isinstance(m, torch.nn.Module)}),
            _ensure_signature(module_or_func),
            "function" if name == "<lambda>" else name,
            tuple(_loose_parameter_warning(n) for n, p in found.items() if isinstance(p, torch.nn.Parameter)),
            is_function=True,
        )
    raise ModelError(
        f"cannot compile {module_or_func!r}: it is a {type(module_or_func).__name__}. Pass an nn.Module, a bound "
        "method such as model.infer, or a function."
    )


def _ensure_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or a wrapper with a signature and code: builtins lack a signature, objects lack code."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return _wrap(function)
    return function if hasattr(function, "__code__") else _wrap(function, signature)


def _wrap(function: Callable[..., Any], signature: inspect.Signature | None = None) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    if signature is not None:
        forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _loose_parameter_warning(name: str) -> str:
    return (
        f"the function uses the parameter {name!r}, which is not in a module: it becomes a constant that is not "
        "trained. Put it into an nn.Module."
    )


def spell_out_keywords(parameters: inspect.Signature, arguments: Sequence[str]) -> inspect.Signature:
    """Return a signature without ``**kwargs``, with a keyword-only parameter for each argument that it collects."""
    known = parameters.parameters
    own = [parameter for parameter in known.values() if parameter.kind is not parameter.VAR_KEYWORD]
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in arguments if n not in known]
    return inspect.Signature([*own, *extra])
