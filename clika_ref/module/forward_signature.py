"""The call interface of a compiled module: a ``forward`` with the signature of the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from clika_ref.compiled.state import EMPTY_MODULE, CompiledModule
from clika_ref.core.errors import ModelError
from clika_ref.module.running import call

OWN_FORWARD = "_clika_forward"
"""The attribute that holds the graph's own forward, as a function of the module."""


class ClassCallableMethod(property):
    """A method that can also be called on the class: tools inspect ``type(module).forward`` for argument names."""

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method on a module, as in ``Class.method(module, ...)``."""
        return self.__get__(module)(*args, **kwargs)


def set_forward(module: CompiledModule) -> None:
    """Make the graph's own ``forward`` at once: the next call may come from a tracer, which cannot make it."""
    signature = module.clika_state.signature.call_signature

    def forward(clika_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(clika_module, args, kwargs)

    own = inspect.Parameter("clika_module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    module.__dict__[OWN_FORWARD] = forward


def own_forward(module: CompiledModule) -> Callable[..., Any]:
    """Return the graph's own ``forward``, bound to a module."""
    return module.__dict__.get(OWN_FORWARD, _reject_empty).__get__(module)  # dynamo does not support MethodType


def _reject_empty(*_: Any, **__: Any) -> None:
    """Raise the error for a call of an empty module."""
    raise ModelError(EMPTY_MODULE)
