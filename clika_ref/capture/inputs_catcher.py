"""Utilities for the user's inputs: move them between devices, and record them while a pipeline runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch

from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.trees import pytree

Nested = TypeVar("Nested")


def clika_move_to_device(nested: Nested, device: torch.device | str | int) -> Nested:
    """Return nested inputs with every tensor on a device.

    Lists, tuples, named tuples, dicts, dataclasses, mappings such as the outputs of transformers, and all types known
    to PyTorch's pytree keep their nesting and type. A tensor that occurs twice stays one tensor. An object with a
    method ``to(device)`` moves itself. Modules and everything else are left alone. The argument itself is not changed.

    Raises:
        ModelError: ``device`` names no device, or one that is not available.
    """
    try:
        placement = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f'clika_move_to_device(..., {device!r}): not a device ({reason}). Write for example "cpu" or "cuda:0".'
        ) from error

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module | type) or not callable(getattr(leaf, "to", None)):
            return leaf
        try:
            return leaf.to(placement)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            description = (
                f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            )
            raise ModelError(
                f"cannot move {description} to {str(placement)!r}: {reason}. Choose a device that this machine has."
            ) from error

    return _rebuild(nested, move, {})


def _rebuild(x: Any, change: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    """Return ``x`` with its leaves changed; containers are rebuilt with the same type."""
    if id(x) in memo:
        return memo[id(x)][1]
    again = functools.partial(_rebuild, change=change, memo=memo)
    if _is_opaque(x):
        result = change(x)
    elif dataclasses.is_dataclass(x) and not isinstance(x, MutableMapping):
        result = copy.copy(x)
        for field in dataclasses.fields(x):
            if hasattr(x, field.name):
                object.__setattr__(result, field.name, again(getattr(x, field.name)))  # frozen ones too
    elif isinstance(x, MutableMapping) and not _is_pytree_node(x):
        result = copy.copy(x)
        for key in x:
            result[key] = again(x[key])
    elif isinstance(x, list | tuple) and not _is_pytree_node(x):
        result = type(x)(again(item) for item in x)
    else:
        result = pytree.tree_map(again, x, is_leaf=lambda part: part is not x)
    memo[id(x)] = x, result  # keep x alive, so that its id is not reused
    return result


def _is_pytree_node(x: Any) -> bool:
    return not pytree.tree_is_leaf(x)


def _is_opaque(x: Any) -> bool:
    """Whether ``x`` is a leaf: not a container, or one that moves itself, such as a packed sequence."""
    if isinstance(x, torch.Tensor | torch.nn.Module | type):
        return True
    if isinstance(x, tuple) and callable(getattr(x, "to", None)):
        return True
    return (
        not isinstance(x, MutableMapping | list | tuple) and not dataclasses.is_dataclass(x) and not _is_pytree_node(x)
    )


def clika_install_inputs_catcher(module_or_method: Any) -> InputsCatcher:
    """Record the inputs of every call of a module, or of a bound method such as ``vae.decode``.

    Run the pipeline, then call the returned object: it returns the inputs in the form that `clika_compile` takes, and
    stops recording. Install a new one for each run.

    ```python
    caught = clika_install_inputs_catcher(pipeline.unet)
    pipeline(prompts)
    clika_compile(pipeline.unet, tracing_inputs=caught())
    ```

    For a module, only ``module(x)`` is recorded, not ``module.forward(x)``; for the latter pass ``module.forward``.

    Raises:
        ModelError: inputs of this kind of object cannot be recorded.
    """
    return InputsCatcher(module_or_method)


class InputsCatcher:
    """Records the inputs of every call; calling it returns them and stops recording.

    Containers are rebuilt and tensors cloned, outside autograd, since a pipeline may later write to its tensors or
    lists.
    """

    def __init__(self, module_or_method: Any) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._name, self._remove = self._install(module_or_method)

    def __call__(self) -> list[Any]:
        """Return the inputs of each call so far, and stop recording.

        Raises:
            ModelError: there was no call.
        """
        self.uninstall()
        if not self._calls:
            raise ModelError(f"{self._name} was not called, so no inputs were caught. Run the pipeline first.")
        return [_as_element(args, kwargs) for args, kwargs in self._calls]

    def uninstall(self) -> None:
        """Stop recording; the recorded inputs stay available."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def _install(self, target: Any) -> tuple[str, Callable[[], None] | None]:
        if isinstance(target, torch.nn.Module):
            # Before the user's own hooks: these may change the inputs, and run again on the recorded ones.
            return type(target).__name__, target.register_forward_pre_hook(
                lambda _, args, kwargs: self._record(args, kwargs), prepend=True, with_kwargs=True
            ).remove
        if isinstance(getattr(target, "clika_inputs_catcher", None), InputsCatcher):
            raise ModelError(
                f"the inputs of {target.__qualname__} are already being caught. Call the first catcher before you "
                "install another."
            )
        owner = getattr(target, "__self__", None)
        if not isinstance(target, types.MethodType) or isinstance(owner, type):
            kind = "a class" if isinstance(target, type) else f"a {type(target).__name__}"
            raise ModelError(
                f"cannot catch the inputs of {target!r}: it is {kind}. Pass a module, or a method of an object such "
                "as vae.decode."
            )
        return target.__func__.__qualname__, self._wrap(owner, target)

    def _wrap(self, owner: Any, method: types.MethodType) -> Callable[[], None]:
        @functools.wraps(method)
        def record_call(*args: Any, **kwargs: Any) -> Any:
            self._record(args, kwargs)
            return method(*args, **kwargs)

        record_call.clika_inputs_catcher = self  # type: ignore[attr-defined]
        name = method.__func__.__name__
        before = getattr(owner, "__dict__", {}).get(name)
        is_method = getattr(owner, name, None) == method  # false if a decorator changed the method's name
        obstacle = _set(owner, name, record_call) if is_method else f"its object does not have it as {name!r}"
        if obstacle is not None:
            raise ModelError(
                f"cannot catch the inputs of {method.__func__.__qualname__}: {obstacle}. Pass the module that it calls."
            )

        def restore() -> None:
            if before is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)

        return restore

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Tensors made in inference mode cannot be used with autograd later; their clones outside it can.
        with torch.inference_mode(mode=False), torch.no_grad():
            memo: dict[int, tuple[Any, Any]] = {}
            self._calls.append((_rebuild(args, copy_leaf, memo), _rebuild(kwargs, copy_leaf, memo)))


def _set(owner: Any, name: str, value: Any) -> str | None:
    """Set an attribute, bypassing the owner's own ``__setattr__``; return the reason if it cannot be set."""
    try:
        object.__setattr__(owner, name, value)
    except AttributeError as error:  # a class with __slots__
        return str(error)
    return None


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor outside autograd, and any other leaf as it is."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _as_element(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call as one element of tracing inputs: a tensor, a tuple, a dict, or a tuple that ends in a dict."""
    if args and kwargs:
        return (*args, kwargs)
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args
