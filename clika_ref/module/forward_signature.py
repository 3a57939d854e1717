"""The call interface of a compiled module: a ``forward`` with the signature of the original."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from clika_ref.capture.origins import is_user_file


class ClassCallableMethod(property):
    """A method that can also be called on the class: tools inspect ``type(module).forward`` for argument names."""

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method on a module, as in ``Class.method(module, ...)``."""
        return self.__get__(module)(*args, **kwargs)


def user_stacklevel() -> int:
    """Return the ``stacklevel`` of the user's frame for the caller, past the frames of hooks and containers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def make_forward(signature: inspect.Signature) -> Callable[..., Any]:
    """Return a ``forward`` that reports the given signature as its own."""

    def forward(clika_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return clika_module._call(args, kwargs)

    own = inspect.Parameter("clika_module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward
