"""How a compiled module is called: its forward under the original's signature."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from clika_ref.capture.origins import is_users


class Method(property):
    """A method of each module, which the class can be called for as well: tools look there for a model's arguments."""

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call it for a module, as its class was called."""
        return self.__get__(module)(*args, **kwargs)


def level_of_the_user() -> int:
    """Return how far above the caller the frame is that called the module, by way of whatever hooks and containers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def forward_under(signature: inspect.Signature) -> Callable[..., Any]:
    """Return a ``forward`` that shows a signature as its own."""

    def forward(clika_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return clika_module._call(args, kwargs)

    own = inspect.Parameter("clika_module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward
